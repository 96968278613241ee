//! The kernel's memory for TCP sockets: the used amount and its limit.
//!
//! Linux counts the buffers of all TCP sockets of all network namespaces together (`mem` of `TCP:` in `/proc/net/sockstat`).
//! From the second number of `net.ipv4.tcp_mem` on, the kernel is under memory pressure. Beyond the third number, sockets get
//! no memory. Inside a network namespace that number cannot be read. It is then calculated from the machine's memory, like
//! the kernel's default.

use std::{fs, path::Path};

/// Size of a page, in bytes. The kernel counts in pages. Machines with larger pages have more memory than is assumed here.
const PAGE_SIZE: usize = 4096;
/// Divisor of the pressure threshold: streams are evicted when more than this part is used.
const PRESSURE_DIVISOR: usize = 2;
/// Divisor of the machine's memory: by default, pressure begins when a 16th of it is used (`tcp_init_mem`).
const DEFAULT_DIVISOR: usize = 16;

/// Reader of the kernel's numbers, with a limit on the used memory.
#[derive(Debug)]
pub struct TcpMemory {
    limit: usize,
}

impl TcpMemory {
    /// Opens the reader. Returns `None` if the kernel does not report the used memory, or no source provides the limit.
    pub fn open(limit: Option<usize>) -> Option<Self> {
        let limit = limit.or_else(|| Some(pressure_threshold()? / PRESSURE_DIVISOR))?;
        let memory = Self { limit };
        memory.used()?;
        Some(memory)
    }

    /// Returns the limit, in bytes.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Returns the memory that all TCP sockets of this machine use now, in bytes.
    #[allow(clippy::unused_self, reason = "only an open reader may ask")]
    pub fn used(&self) -> Option<usize> {
        // The kernel reads from memory, so this does not block on a disk.
        parse_used(&read("/proc/net/sockstat")?)
    }
}

fn read(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// Returns the pressure threshold, in bytes.
fn pressure_threshold() -> Option<usize> {
    let configured =
        read("/proc/sys/net/ipv4/tcp_mem").and_then(|text| parse_pressure_threshold(&text));
    configured.or_else(|| Some(parse_total(&read("/proc/meminfo")?)? / DEFAULT_DIVISOR))
}

fn parse_used(sockstat: &str) -> Option<usize> {
    let tcp = sockstat
        .lines()
        .find_map(|line| line.strip_prefix("TCP:"))?;
    let mut words = tcp.split_whitespace();
    words.find(|word| *word == "mem")?;
    words.next()?.parse::<usize>().ok()?.checked_mul(PAGE_SIZE)
}

fn parse_pressure_threshold(tcp_mem: &str) -> Option<usize> {
    let pages = tcp_mem.split_whitespace().nth(1)?;
    pages.parse::<usize>().ok()?.checked_mul(PAGE_SIZE)
}

fn parse_total(meminfo: &str) -> Option<usize> {
    let total = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib = total.split_whitespace().next()?.parse::<usize>().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_numbers_are_read() {
        let sockstat =
            "sockets: used 16\nTCP: inuse 1 orphan 0 tw 0 alloc 1 mem 25\nUDP: inuse 0 mem 7\n";
        assert_eq!(parse_used(sockstat), Some(25 * PAGE_SIZE));
        assert_eq!(
            parse_pressure_threshold("287898\t383866\t575796\n"),
            Some(383_866 * PAGE_SIZE)
        );
        let meminfo = "MemTotal:       24684244 kB\nMemFree:        13037300 kB\n";
        assert_eq!(parse_total(meminfo), Some(24_684_244 * 1024));
        for broken in ["", "TCP: mem", "TCP: mem x", "UDP: mem 7"] {
            assert_eq!(parse_used(broken), None, "{broken}");
        }
    }
}
