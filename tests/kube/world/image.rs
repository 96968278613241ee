//! The images that containers run, packed here: Debian's static busybox, and for pods of Causeway's own the tested binary.
//!
//! The first is the pause image as well: its default command is an endless sleep. Nothing is ever fetched from a registry.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::process::{Program, must};

/// The image's name.
pub(crate) const NAME: &str = "causeway.test/busybox:1";

/// Path of busybox in Debian's package.
pub(crate) const BUSYBOX: &str = "/bin/busybox";

/// Name of Causeway's image, as in `deploy/`.
pub(crate) const OURS: &str = "docker.io/library/causeway:0.1.0";

/// Packs the image of busybox into an archive that `ctr image import` takes.
pub(crate) fn pack(folder: &Path) -> PathBuf {
    let folder = folder.join("image");
    let root = folder.join("root");
    for name in ["bin", "tmp", "proc", "sys", "dev", "etc"] {
        fs::create_dir_all(root.join(name)).unwrap();
    }
    fs::copy(BUSYBOX, root.join("bin/busybox")).unwrap();
    let applets = Program::new(BUSYBOX).args(["--list"]).run().ok().text();
    for applet in applets.lines().filter(|name| *name != "busybox") {
        std::os::unix::fs::symlink("busybox", root.join("bin").join(applet)).unwrap();
    }
    let run = json!({ "Env": ["PATH=/bin"], "Entrypoint": ["/bin/sleep", "2000000000"] });
    seal(&folder, NAME, &run)
}

/// Packs the tested binary in the same way as the Dockerfile does, with the libraries that it is linked to.
pub(crate) fn ours(folder: &Path, binary: &str) -> PathBuf {
    let folder = folder.join("image-ours");
    let root = folder.join("root");
    fs::create_dir_all(&root).unwrap();
    let program = root.join("causeway");
    let strip = Program::new("strip").args(["-o"]).args([&program]);
    strip.args([binary]).run().ok();
    let linked = Program::new("ldd").args([binary]).run().text();
    for library in linked.split_whitespace().filter(|it| it.starts_with('/')) {
        let place = root.join(library.trim_start_matches('/'));
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        fs::copy(library, place).unwrap();
    }
    // The folders of the Dockerfile, with their modes and owner.
    must(&format!(
        "install -d -o 65532 -g 65532 -m 755 {0}/etc/causeway {0}/run {0}/var {0}/var/lib",
        root.display()
    ));
    must(&format!(
        "install -d -o 65532 -g 65532 -m 700 {0}/run/causeway {0}/var/lib/causeway {0}/var/lib/causeway-edge",
        root.display()
    ));
    let run = json!({ "Entrypoint": ["/causeway"], "User": "65532:65532" });
    seal(&folder, OURS, &run)
}

/// Packs busybox and a file `/large` of this many megabytes into an image of this name. Returns the archive, and the SHA-256 of the file.
pub(crate) fn large(folder: &Path, name: &str, megabytes: usize) -> (PathBuf, String) {
    let (small, folder) = (folder.join("image/root"), folder.join("image-large"));
    fs::create_dir_all(&folder).unwrap();
    let root = folder.join("root");
    must(&format!("cp -a {} {}", small.display(), root.display()));
    let file = root.join("large").display().to_string();
    must(&format!(
        "dd if=/dev/urandom of={file} bs=1M count={megabytes} status=none"
    ));
    let hash = Program::new("sha256sum").args([file]).run().ok().text();
    let hash = hash.split_whitespace().next().unwrap_or_default();
    let run = json!({ "Env": ["PATH=/bin"] });
    (seal(&folder, name, &run), hash.to_owned())
}

/// Makes an image of the folder `root` in this one.
fn seal(folder: &Path, name: &str, run: &Value) -> PathBuf {
    let place = folder.display();
    must(&format!("tar -C {place}/root -cf {place}/layer.tar ."));
    let layer = Sha256::digest(fs::read(folder.join("layer.tar")).unwrap());
    let config = json!({
        "architecture": std::env::consts::ARCH.replace("x86_64", "amd64").replace("aarch64", "arm64"),
        "os": "linux",
        "config": run,
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", data_encoding::HEXLOWER.encode(&layer))] },
    });
    let manifest =
        json!([{ "Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"] }]);
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    fs::write(folder.join("manifest.json"), manifest.to_string()).unwrap();
    let archive = folder.join("image.tar");
    must(&format!(
        "tar -C {place} -cf {} manifest.json config.json layer.tar",
        archive.display()
    ));
    archive
}
