# One image for gateway, edge and all commands: it contains only a static binary.
#
#   docker build -t causeway --target causeway .          FROM scratch, without a shell
#   docker build -t causeway:nft --target with-nft .      with the program `nft`, on Debian
#
# Behind a mirror, name its images:
#   docker build --build-arg BUILDER_IMAGE=mirror.example/rust:1.95-bookworm .
#
# BuildKit is not needed: docker-compose 1.29 and podman build it as well.

# Rust and a C compiler on glibc.
ARG BUILDER_IMAGE=rust:1.95-bookworm
# Base of the images without `nft`.
ARG BASE_IMAGE=scratch
# Base of the image into which apt-get installs `nft`.
ARG NFT_BASE_IMAGE=debian:12-slim

FROM ${BUILDER_IMAGE} AS build
WORKDIR /src
COPY Cargo.toml Cargo.lock ./
COPY .cargo .cargo
COPY config/Cargo.toml config/
COPY rt/Cargo.toml rt/
COPY watch-cache/Cargo.toml watch-cache/
COPY tunnel/Cargo.toml tunnel/
COPY upstream/Cargo.toml upstream/
COPY certs/Cargo.toml certs/
COPY gateway/Cargo.toml gateway/
COPY edge/Cargo.toml edge/
COPY k8s/Cargo.toml k8s/
COPY tests/summary/Cargo.toml tests/summary/
# Dependencies, from the manifests only: this layer stays until a manifest changes. The target is named so that build
# scripts are not linked statically too. ARM kernels have pages of up to 64 KiB, independent of this machine's. Messages
# contain no paths of crates of the build.
RUN set -eu; \
    mkdir src; echo 'fn main() {}' > src/main.rs; \
    for each in config rt watch-cache tunnel upstream certs gateway edge k8s; do mkdir "$each/src"; : > "$each/src/lib.rs"; done; \
    cargo fetch --locked; \
    crates=$(ls -d "${CARGO_HOME:-$HOME/.cargo}"/registry/src/* | head -n 1); test -n "$crates"; \
    case $(uname -m) in aarch64) pages=16 ;; *) pages=12 ;; esac; \
    echo "JEMALLOC_SYS_WITH_LG_PAGE=$pages \
        RUSTFLAGS='-C target-feature=+crt-static --remap-path-prefix=$crates= -C strip=symbols' \
        cargo build --release --locked --features own-resolver \
        --target $(rustc -vV | sed -n 's/^host: //p')" > /build.sh; \
    sh /build.sh; \
    rm -r src ./*/src
COPY . .
# The stand-ins above were built later than some of these files were written.
RUN set -eu; \
    find src config rt watch-cache tunnel upstream certs gateway edge k8s -name '*.rs' -exec touch {} +; \
    sh /build.sh; \
    mkdir -p /image/etc/causeway /image/run/causeway /image/var/lib/causeway /image/var/lib/causeway-edge; \
    chmod 0700 /image/run/causeway /image/var/lib/causeway /image/var/lib/causeway-edge; \
    cp target/*/release/causeway /image/causeway; \
    /image/causeway --version

FROM ${BASE_IMAGE} AS causeway
COPY --from=build --chown=65532:65532 /image/ /
# Volumes that are mounted at the directories of the image take their owner from there.
USER 65532:65532
ENTRYPOINT ["/causeway"]
HEALTHCHECK --interval=5s --timeout=5s --start-period=10s --retries=3 CMD ["/causeway", "health"]
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Causeway" \
      org.opencontainers.image.description="Reach services of nodes behind NAT over tunnels that the nodes dial" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="https://github.com/causeway/causeway" \
      org.opencontainers.image.licenses="Apache-2.0"

FROM ${NFT_BASE_IMAGE} AS with-nft
RUN apt-get update \
    && apt-get install -y --no-install-recommends nftables \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build --chown=65532:65532 /image/ /
# Only root in a container has the capability (NET_ADMIN) that the container gets.
USER 0:0
ENTRYPOINT ["/causeway"]
HEALTHCHECK --interval=5s --timeout=5s --start-period=10s --retries=3 CMD ["/causeway", "health"]
LABEL org.opencontainers.image.title="Causeway" \
      org.opencontainers.image.description="Reach services of nodes behind NAT over tunnels that the nodes dial; with nft" \
      org.opencontainers.image.licenses="Apache-2.0"

# The default target is the small image. (Builders before BuildKit make all stages above: name the target there.)
FROM causeway
