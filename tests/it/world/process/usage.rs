//! Resource usage of a process, as the system reports it.

use std::{fs, time::Duration};

/// Resource usage at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    /// Open files, sockets among them.
    pub(crate) files: usize,
    /// Threads.
    pub(crate) threads: usize,
    /// Resident memory, in bytes.
    pub(crate) memory: usize,
    /// Peak resident memory, in bytes.
    pub(crate) peak: usize,
    /// CPU time so far.
    pub(crate) cpu: Duration,
}

impl Usage {
    pub(super) fn of(id: u32) -> Self {
        let status = fs::read_to_string(format!("/proc/{id}/status")).unwrap();
        let number = |name: &str| -> usize {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.unwrap().split_whitespace().next().unwrap();
            number.parse().unwrap()
        };
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap();
        // After the name, which may contain any character: fields 14 and 15 are user and system time in ticks of 10 ms.
        let (_, rest) = stat.rsplit_once(')').unwrap();
        let ticks = rest.split_whitespace().skip(11).take(2);
        let ticks: u64 = ticks.map(|text| text.parse::<u64>().unwrap()).sum();
        Self {
            files: fs::read_dir(format!("/proc/{id}/fd")).unwrap().count(),
            threads: number("Threads:"),
            memory: number("VmRSS:") * 1024,
            peak: number("VmHWM:") * 1024,
            cpu: Duration::from_millis(ticks * 10),
        }
    }
}
