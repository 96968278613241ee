//! Resources that this process uses, read from `/proc/self`.

use std::fs;
use std::sync::OnceLock;

/// Number of ticks per second of the times in `/proc`: `USER_HZ`, which is 100 on every Linux architecture that Rust
/// supports.
const TICKS_PER_SECOND: f64 = 100.0;
/// Memory in `/proc/self/status` is in KiB, independent of the page size.
const KIB: u64 = 1024;

/// Resources that this process uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    pub(crate) cpu_seconds: f64,
    pub(crate) start_time_seconds: f64,
    pub(crate) open_fds: u64,
    pub(crate) max_fds: u64,
    pub(crate) threads: u64,
    /// Resident memory, in bytes.
    pub(crate) resident_bytes: u64,
    /// Virtual memory, in bytes.
    pub(crate) virtual_bytes: u64,
}

impl Usage {
    /// Returns the present usage, or `None` if `/proc` does not have it.
    pub(crate) fn now() -> Option<Self> {
        let read = |file: &str| fs::read_to_string(file).ok();
        let (stat, status) = (read("/proc/self/stat")?, read("/proc/self/status")?);
        // The program name, in brackets, may contain blanks and brackets. Field 3 follows it.
        let (_, fields) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let ticks = |field: usize| fields.get(field - 3)?.parse::<f64>().ok();
        let booted: f64 = parse_number(&read("/proc/stat")?, "btime ")?;
        Some(Self {
            cpu_seconds: (ticks(14)? + ticks(15)?) / TICKS_PER_SECOND,
            start_time_seconds: booted + ticks(22)? / TICKS_PER_SECOND,
            open_fds: u64::try_from(fs::read_dir("/proc/self/fd").ok()?.count()).ok()?,
            max_fds: parse_number(&read("/proc/self/limits")?, "Max open files")?,
            threads: parse_number(&status, "Threads:")?,
            resident_bytes: parse_number::<u64>(&status, "VmRSS:")? * KIB,
            virtual_bytes: parse_number::<u64>(&status, "VmSize:")? * KIB,
        })
    }
}

/// Returns the first number of the line with this prefix.
fn parse_number<N: std::str::FromStr>(text: &str, prefix: &str) -> Option<N> {
    let line = text.lines().find_map(|line| line.strip_prefix(prefix))?;
    line.split_whitespace().next()?.parse().ok()
}

type Counts = Box<dyn Fn() -> Vec<(&'static str, u64)> + Send + Sync>;

static DROPPED_LINES: OnceLock<Counts> = OnceLock::new();

/// Sets the source of the numbers of dropped log lines, by log. A later source is ignored, because a process sets up its logs
/// once.
pub fn count_dropped_log_lines(
    counts: impl Fn() -> Vec<(&'static str, u64)> + Send + Sync + 'static,
) {
    let _ = DROPPED_LINES.set(Box::new(counts));
}

pub(crate) fn dropped_log_lines() -> Vec<(&'static str, u64)> {
    DROPPED_LINES
        .get()
        .map(|counts| counts())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_use_of_this_process_is_plausible() {
        let usage = Usage::now().unwrap();
        assert!(usage.open_fds > 2 && usage.open_fds <= usage.max_fds);
        assert!(
            usage.threads > 0
                && usage.resident_bytes > 0
                && usage.virtual_bytes >= usage.resident_bytes
        );
        let now = std::time::SystemTime::now();
        let now = now.duration_since(std::time::UNIX_EPOCH).unwrap();
        assert!(usage.start_time_seconds > 0.0 && usage.start_time_seconds <= now.as_secs_f64());
        assert!(usage.cpu_seconds >= 0.0);
    }
}
