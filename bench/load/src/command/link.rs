//! A link between two network namespaces: IP packets with a delay and a rate in each direction.
//!
//! 1. Each namespace gets a TUN, with the address of its end and a route to the other.
//! 2. A packet that is read enters the link and is written to the other TUN when it is due.
//! 3. A packet that finds the queue before the link full is dropped, as by a router.
//!
//! TCP is the kernel's own, from end to end over the whole delay, with its windows and its losses. Packets pass as the
//! kernel makes them for a card with segmentation offload (up to 64 KiB, a header of the kernel's before each), so that a
//! fast link costs little; the rate counts the headers that the segments would have had. Needs root. The interfaces are
//! removed with the process; the user who names the namespaces makes and removes them.

use super::link_queue::LinkQueue;
use crate::{cli, report, stop::Stop};
use anyhow::{Context, ensure};
use nix::sched::{CloneFlags, setns};
use serde_json::{Value, json};
use std::{
    collections::VecDeque,
    fs::File,
    io,
    net::IpAddr,
    process::Command,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};
use tokio::time::{Instant, sleep_until};
use tun_rs::{AsyncDevice, DeviceBuilder};

/// The kernel's header before each packet (`virtio_net_hdr`).
const HEADER: usize = 10;
/// The largest packet with its header, and some reserve.
const LARGEST: usize = (64 << 10) + 256;
/// Timers tick each millisecond: a packet that is due within half of it goes now, so that the mean is right.
const SLACK: Duration = Duration::from_micros(500);
/// Packets that wait in a TUN while this process is not scheduled; the kernel's own 500 are lost on a busy machine.
const WAITING: u32 = 10_000;

/// Creates the link and runs it until it is asked to stop.
pub(crate) async fn run(asked: &cli::Link, stop: Stop) -> anyhow::Result<()> {
    let ([here, there], [near, far]) = (&asked.between[..], &asked.addresses[..]) else {
        anyhow::bail!("a link has two ends: --between A,B --addresses IP,IP");
    };
    ensure!(
        near.is_ipv4() == far.is_ipv4(),
        "{near} and {far} are not of one family"
    );
    let one = end(here, asked, (*near, *far)).with_context(|| format!("namespace {here}"))?;
    let two = end(there, asked, (*far, *near)).with_context(|| format!("namespace {there}"))?;
    report::say(&json!({"event": "ready", "between": asked.between}));
    let (forth, back) = (Count::default(), Count::default());
    let carried = async {
        tokio::try_join!(
            carry(&one, &two, asked.conditions, &forth),
            carry(&two, &one, asked.conditions, &back),
        )
    };
    let carried = stop.token.run_until_cancelled(carried).await;
    let (forth, back) = (forth.say(lost(here, asked)), back.say(lost(there, asked)));
    report::say(&json!({"event": "end", "forth": forth, "back": back}));
    match carried {
        Some(Err(error)) => Err(error).context("the link broke"),
        _ => Ok(()),
    }
}

/// Creates the TUN in one namespace. Meanwhile this thread is in that namespace.
fn end(
    netns: &str,
    asked: &cli::Link,
    (own, other): (IpAddr, IpAddr),
) -> anyhow::Result<AsyncDevice> {
    let before = File::open("/proc/thread-self/ns/net")?;
    let path = format!("/run/netns/{netns}");
    let there = File::open(&path).with_context(|| format!("{path} (ip netns add {netns})"))?;
    setns(there, CloneFlags::CLONE_NEWNET).context("cannot enter it; are you root?")?;
    let made = DeviceBuilder::new()
        .name(&asked.name)
        .mtu(asked.mtu)
        .offload(true)
        .tx_queue_len(WAITING)
        .build_async();
    setns(before, CloneFlags::CLONE_NEWNET).context("cannot return from it")?;
    let device = made.context("cannot make a TUN (/dev/net/tun)")?;
    let name = &asked.name;
    ip(&format!(
        "-n {netns} addr add {own} peer {other} dev {name}"
    ))?;
    ip(&format!("-n {netns} link set {name} up"))?;
    Ok(device)
}

/// Packets that a TUN dropped before they could be read: because of the machine and not of the link.
fn lost(netns: &str, asked: &cli::Link) -> Option<u64> {
    let message = ip(&format!("-n {netns} -s -j link show dev {}", asked.name)).ok()?;
    let message: Value = serde_json::from_slice(&message).ok()?;
    message[0]["stats64"]["tx"]["dropped"].as_u64()
}

fn ip(line: &str) -> anyhow::Result<Vec<u8>> {
    let ran = Command::new("ip")
        .args(line.split(' '))
        .output()
        .context("ip (of iproute2)")?;
    let message = String::from_utf8_lossy(&ran.stderr);
    ensure!(ran.status.success(), "ip {line}: {}", message.trim());
    Ok(ran.stdout)
}

/// Traffic that passed in one direction.
#[derive(Debug, Default)]
struct Count {
    packets: AtomicU64,
    bytes: AtomicU64,
    dropped: AtomicU64,
}

impl Count {
    fn say(&self, lost: Option<u64>) -> Value {
        json!({
            "packets": self.packets.load(Relaxed),
            "bytes": self.bytes.load(Relaxed),
            "dropped": self.dropped.load(Relaxed),
            "lost": lost,
        })
    }
}

/// One direction, until a TUN fails.
async fn carry(
    from: &AsyncDevice,
    to: &AsyncDevice,
    asked: cli::LinkConditions,
    count: &Count,
) -> io::Result<()> {
    let mut link_queue = LinkQueue::new(asked, Instant::now());
    let mut under_way: VecDeque<(Instant, Box<[u8]>)> = VecDeque::new();
    let mut buffer = vec![0; LARGEST];
    loop {
        let due = under_way.front().map(|(due, _)| *due - SLACK);
        tokio::select! {
            biased;
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                let now = Instant::now() + SLACK;
                while let Some((_, packet)) = under_way.pop_front_if(|(due, _)| *due <= now) {
                    // A namespace whose end is down loses packets, like a host that is off.
                    let _ = to.send(&packet).await;
                }
            }
            read = from.recv(&mut buffer) => {
                let packet = buffer.get(..read?).unwrap_or_default();
                let (now, length) = (Instant::now(), on_the_wire(packet));
                if link_queue.room(now) > now {
                    count.dropped.fetch_add(1, Relaxed);
                    continue;
                }
                count.packets.fetch_add(1, Relaxed);
                count.bytes.fetch_add(u64::try_from(length).unwrap_or_default(), Relaxed);
                under_way.push_back((link_queue.enter(length, now), packet.into()));
            }
        }
    }
}

/// Returns the number of bytes of a packet after segmentation, with a header for each segment.
fn on_the_wire(packet: &[u8]) -> usize {
    let word = |at: usize| {
        let bytes = packet
            .get(at..at + 2)
            .and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, |bytes| usize::from(u16::from_ne_bytes(bytes)))
    };
    let length = packet.len().saturating_sub(HEADER);
    let (header, segment) = (word(2), word(4));
    if segment == 0 {
        return length;
    }
    let segments = length.saturating_sub(header).div_ceil(segment).max(1);
    length + (segments - 1) * header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_segment_of_a_large_packet_has_its_header() {
        let mut packet = vec![0; HEADER + 40 + 3000];
        packet[2..4].copy_from_slice(&40_u16.to_ne_bytes());
        packet[4..6].copy_from_slice(&1460_u16.to_ne_bytes());
        assert_eq!(on_the_wire(&packet), 3 * 40 + 3000);
        assert_eq!(on_the_wire(&[0; HEADER + 100]), 100);
        assert_eq!(on_the_wire(&[]), 0);
    }
}
