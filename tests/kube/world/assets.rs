//! Requirements of the tests on the machine: the parts of Kubernetes, programs, and permission to make namespaces.
//!
//! `KUBEBUILDER_ASSETS` names the folder of the parts. If the variable is not set, the folder is the one that
//! `tests/kube/assets/build` has made. No test builds the parts. The inner program learns the folder by that variable.

use std::{env, os::unix::fs::MetadataExt, path::Path, path::PathBuf, process::Command};

use super::{cage, node};

/// The convention of envtest.
const VARIABLE: &str = "KUBEBUILDER_ASSETS";

/// The folder of kube-apiserver, kubectl and the others.
pub(crate) fn folder() -> Option<PathBuf> {
    if let Some(named) = env::var_os(VARIABLE) {
        return Some(named.into()).filter(|named: &PathBuf| named.is_dir());
    }
    let build = [env!("CARGO_MANIFEST_DIR"), "tests/kube/assets/build"];
    let made = Command::new(build.iter().collect::<PathBuf>())
        .arg("--built")
        .stderr(std::process::Stdio::inherit())
        .output()
        .ok()
        .filter(|made| made.status.success())?;
    let printed = String::from_utf8_lossy(&made.stdout).trim().to_owned();
    Some(printed.into())
}

/// Returns the requirement that is missing here, if any.
pub(crate) fn missing() -> Option<String> {
    if Path::new("/proc/self").metadata().ok()?.uid() != 0 {
        return Some("root".to_owned());
    }
    let programs = [
        "ip", "nft", "nsenter", "setpriv", "script", "tar", "iptables", "dig", "openssl",
    ];
    let all = programs.iter().chain(&node::NEEDS);
    if let Some(program) = all.copied().find(|program| !is_here(program)) {
        return Some(format!("{program} (run .ci/setup)"));
    }
    if !Path::new(node::PLUGINS).join("bridge").exists() {
        return Some("the CNI plugins (run .ci/setup)".to_owned());
    }
    if cage::hierarchies().is_empty() {
        return Some("cgroups".to_owned());
    }
    (!cage::possible()).then(|| "namespaces (unshare)".to_owned())
}

fn is_here(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|folder| folder.join(program).exists())
}

/// kubectl of Debian 12, which speaks SPDY only. `.ci/setup` unpacks it into the cache.
pub(crate) fn old_kubectl() -> Option<PathBuf> {
    unpacked("kubectl-1.20/usr/bin/kubectl")
}

/// A registry of images. `.ci/setup` unpacks it into the cache.
pub(crate) fn registry() -> Option<PathBuf> {
    unpacked("docker-registry/usr/bin/docker-registry")
}

fn unpacked(program: &str) -> Option<PathBuf> {
    let folder = |name| env::var_os(name).filter(|value| !value.is_empty());
    let cache = folder("CAUSEWAY_CACHE")
        .map(PathBuf::from)
        .or_else(|| folder("XDG_CACHE_HOME").map(|home| PathBuf::from(home).join("causeway")))
        .or_else(|| folder("HOME").map(|home| PathBuf::from(home).join(".cache/causeway")))?;
    Some(cache.join(program)).filter(|program| program.exists())
}
