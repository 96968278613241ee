# One image for gateway, edge and all commands: it contains only a static binary.
#
#   docker build -t causeway --target causeway .          FROM scratch, without a shell
#   docker build -t causeway:nft --target with-nft .      with the program `nft`, on Debian
#
# For another architecture, amd64 or arm64, BuildKit cross-compiles the binary without emulation:
#   docker build --platform linux/arm64 -t causeway:arm64 --target causeway .
# The image `with-nft` runs apt-get: for another architecture it needs binfmt_misc and qemu-user-static.
#
# Behind a mirror, name its images:
#   docker build --build-arg BUILDER_IMAGE=mirror.example/rust:1.95-bookworm .
#
# For this machine's architecture BuildKit is not needed: docker-compose 1.29 and podman build it as well.

# Rust and a C compiler on glibc, on Debian if the binary is for another architecture.
ARG BUILDER_IMAGE=rust:1.95-bookworm
# Base of the images without `nft`.
ARG BASE_IMAGE=scratch
# Base of the image into which apt-get installs `nft`.
ARG NFT_BASE_IMAGE=debian:12-slim

# The build runs on this machine's architecture. Builders before BuildKit do not set BUILDPLATFORM and TARGETARCH.
FROM --platform=${BUILDPLATFORM:-linux} ${BUILDER_IMAGE} AS build
ARG TARGETARCH
# Settings of cargo for the target. The target is named so that build scripts are not linked statically too. ARM kernels have
# pages of up to 64 KiB, independent of this machine's.
RUN set -eu; \
    host=$(rustc -vV | sed -n 's/^host: //p'); \
    case ${TARGETARCH:-${host%%-*}} in \
        amd64 | x86_64) cpu=x86_64 gcc=gcc-x86-64-linux-gnu libc=libc6-dev-amd64-cross pages=12 ;; \
        arm64 | aarch64) cpu=aarch64 gcc=gcc-aarch64-linux-gnu libc=libc6-dev-arm64-cross pages=16 ;; \
        *) echo "no image for $TARGETARCH: only for amd64 and arm64" >&2; exit 1 ;; \
    esac; \
    target=$cpu-${host#*-}; \
    printf '[build]\ntarget = "%s"\n[env]\nJEMALLOC_SYS_WITH_LG_PAGE = "%s"\n' "$target" "$pages" > /target.toml; \
    if [ "$target" != "$host" ]; then \
        printf '[target.%s]\nlinker = "%s-linux-gnu-gcc"\n' "$target" "$cpu" >> /target.toml; \
        apt-get update; apt-get install -y --no-install-recommends "$gcc" "$libc"; rm -rf /var/lib/apt/lists/*; \
        if command -v rustup; then rustup target add "$target"; fi; \
    fi
WORKDIR /src
COPY Cargo.toml Cargo.lock ./
COPY .cargo .cargo
COPY config/Cargo.toml config/
COPY rt/Cargo.toml rt/
COPY tls/Cargo.toml tls/
COPY watch-cache/Cargo.toml watch-cache/
COPY tunnel/Cargo.toml tunnel/
COPY upstream/Cargo.toml upstream/
COPY certs/Cargo.toml certs/
COPY gateway/Cargo.toml gateway/
COPY edge/Cargo.toml edge/
COPY k8s/Cargo.toml k8s/
COPY tests/summary/Cargo.toml tests/summary/
# Dependencies, from the manifests only: this layer stays until a manifest changes. Messages contain no paths of crates of the
# build.
RUN set -eu; \
    mkdir src; echo 'fn main() {}' > src/main.rs; \
    for each in config rt tls watch-cache tunnel upstream certs gateway edge k8s; do mkdir "$each/src"; : > "$each/src/lib.rs"; done; \
    cargo fetch --locked; \
    crates=$(ls -d "${CARGO_HOME:-$HOME/.cargo}"/registry/src/* | head -n 1); test -n "$crates"; \
    echo "RUSTFLAGS='-C target-feature=+crt-static --remap-path-prefix=$crates= -C strip=symbols' \
        cargo build --release --locked --features own-resolver --config /target.toml" > /build.sh; \
    sh /build.sh; \
    rm -r src ./*/src
COPY . .
# The stand-ins above were built later than some of these files were written.
RUN set -eu; \
    find src config rt tls watch-cache tunnel upstream certs gateway edge k8s -name '*.rs' -exec touch {} +; \
    sh /build.sh; \
    mkdir -p /image/etc/causeway /image/run/causeway /image/var/lib/causeway /image/var/lib/causeway-edge; \
    chmod 0700 /image/run/causeway /image/var/lib/causeway /image/var/lib/causeway-edge; \
    cp target/*/release/causeway /image/causeway; \
    if ! grep -q linker /target.toml; then /image/causeway --version; fi

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
