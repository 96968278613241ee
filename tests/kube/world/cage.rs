//! Namespaces of the tests: separate network, mounts and processes, which end together.
//!
//! The program starts itself again as the first process of new namespaces. When that process ends for any reason, the
//! kernel ends all processes in the namespaces. The outer program removes the remains: the cgroups and a folder. Nothing
//! inside may rely on being stopped in order.

use std::{
    env,
    fs::{self, File},
    io::{self, Seek},
    path::{Path, PathBuf},
    process::{Command, ExitCode, id},
    thread,
};

use super::process::must;
use crate::skips;

/// Variable that marks the inner program, and has the path of its folder.
const INSIDE: &str = "CAUSEWAY_KUBE_INSIDE";
/// Variable with the group of the tests to run.
const GROUP: &str = "CAUSEWAY_KUBE_GROUP";

/// The folder of the tests, if this is the inner program.
pub(crate) fn inside() -> Option<PathBuf> {
    env::var_os(INSIDE).map(PathBuf::from)
}

/// Returns the group of the tests that the inner program runs.
pub(crate) fn group() -> usize {
    let group = env::var(GROUP).ok();
    let group = group.and_then(|text| text.parse().ok());
    group.expect("the outer program has logged it")
}

/// The tests' own branch below each of the machine's cgroup hierarchies.
pub(crate) fn branch(folder: &Path) -> String {
    let name = folder.file_name().expect("a folder made here has a name");
    name.to_string_lossy().into_owned()
}

/// Returns the folders of the machine's cgroups: one for each hierarchy of version 1, or the one of version 2.
pub(crate) fn hierarchies() -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    if root.join("cgroup.controllers").exists() {
        return vec![root.to_owned()];
    }
    let Ok(entries) = fs::read_dir(root) else {
        return Vec::new();
    };
    entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.join("cgroup.procs").exists())
        .collect()
}

/// Whether this process can make such namespaces.
pub(crate) fn possible() -> bool {
    let tried = unshare().args(["--", "ip", "link", "show", "lo"]).output();
    tried.is_ok_and(|output| output.status.success())
}

fn unshare() -> Command {
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "unshare"])
        .args(["--net", "--mount", "--pid", "--fork", "--kill-child"])
        .args(["--mount-proc", "--propagation", "private"]);
    command
}

/// Runs these groups of tests to their end beside each other, and removes their remains. Prints the output of the first at
/// once, and that of the others afterwards.
pub(crate) fn run(assets: &Path, groups: &[usize]) -> ExitCode {
    let Some((first, others)) = groups.split_first() else {
        return ExitCode::SUCCESS;
    };
    let mut message: Vec<File> = others
        .iter()
        .map(|_| tempfile::tempfile().expect("a file for the log"))
        .collect();
    let worst = thread::scope(|scope| {
        let beside: Vec<_> = others
            .iter()
            .zip(&message)
            .map(|(group, message)| {
                let apart = message.try_clone().expect("the same file");
                scope.spawn(|| run_to_end(assets, *group, Some(apart)))
            })
            .collect();
        let first = run_to_end(assets, *first, None);
        let codes = beside.into_iter().map(|one| one.join().unwrap());
        codes.fold(first, u8::max)
    });
    for message in &mut message {
        message.rewind().unwrap();
        io::copy(message, &mut io::stdout()).unwrap();
    }
    ExitCode::from(worst)
}

/// Runs a group in the inner program, with its output in a file if given. Returns its exit code.
fn run_to_end(assets: &Path, group: usize, message: Option<File>) -> u8 {
    let folder = tempfile::Builder::new()
        .prefix("causeway-kube-")
        .tempdir()
        .expect("a folder for the tests");
    let program = env::current_exe().expect("this program has a path");
    let mut inner = unshare();
    inner
        .arg("--")
        .arg(program)
        .args(env::args_os().skip(1))
        .env(INSIDE, folder.path())
        .env("KUBEBUILDER_ASSETS", assets)
        .env(GROUP, group.to_string());
    let (variable, file) = skips().variable();
    inner.env(variable, file);
    if let Some(message) = message {
        inner.stdout(message);
    }
    let ended = inner.status();
    for hierarchy in hierarchies() {
        remove(&hierarchy.join(branch(folder.path())));
    }
    let Ok(Some(code)) = ended.map(|status| status.code()) else {
        eprintln!("kube: process {} saw its tests end by a signal", id());
        return 1;
    };
    u8::try_from(code).unwrap_or(1)
}

/// Removes a cgroup with all that are below it.
fn remove(cgroup: &Path) {
    for below in fs::read_dir(cgroup).into_iter().flatten().flatten() {
        if below.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove(&below.path());
        }
    }
    let _ = fs::remove_dir(cgroup);
}

/// Gives the inner program its own environment: names of namespaces, names of hosts, and kernel settings that a kubelet
/// would change for the whole machine.
pub(crate) fn furnish(folder: &Path) {
    must("ip link set lo up");
    must("mount -t tmpfs tmpfs /run");
    let settings = [
        ("vm/overcommit_memory", "1"),
        ("kernel/panic", "10"),
        ("kernel/panic_on_oops", "1"),
        ("kernel/keys/root_maxkeys", "1000000"),
        ("kernel/keys/root_maxbytes", "25000000"),
    ];
    for (name, wanted) in settings {
        lay(folder, &format!("/proc/sys/{name}"), wanted);
    }
    lay(folder, "/etc/resolv.conf", "");
    lay(folder, "/etc/hosts", super::net::HOSTS);
}

/// Mounts a file with this text over another.
pub(crate) fn lay(folder: &Path, over: &str, text: &str) {
    let name = over.trim_start_matches('/').replace('/', "-");
    let file = folder.join(name);
    fs::write(&file, format!("{}\n", text.trim_end())).unwrap();
    must(&format!("mount --bind {} {over}", file.display()));
}
