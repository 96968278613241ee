//! Selection of the ports of a list that can be served, if one entry prevents the gateway from serving the whole list.
//!
//! Only an attempt finds that entry, because its port may be taken by another program. The list is halved until the refused
//! entries are isolated.

use causeway_gateway::config::NodePorts;
use std::collections::BTreeSet;

/// An entry: its list, and the port.
type Entry = (List, u16);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum List {
    Http,
    Https,
    Loopback,
}

/// Applies `desired` in place of `previous`, or as much of it as is accepted. Returns the ports in force, and the reasons for
/// which the others are not.
///
/// # Errors
/// The reason, if nothing new could be applied. `previous` is then in force.
pub(super) async fn apply(
    previous: &NodePorts,
    desired: &NodePorts,
    mut try_apply: impl AsyncFnMut(NodePorts) -> Result<(), String>,
) -> Result<(NodePorts, Vec<String>), String> {
    let Err(rejection) = try_apply(desired.clone()).await else {
        return Ok((desired.clone(), Vec::new()));
    };
    let (desired, previous) = (entries(desired), entries(previous));
    let mut served: BTreeSet<Entry> = desired.intersection(&previous).copied().collect();
    let new: Vec<Entry> = desired.difference(&previous).copied().collect();
    if new.len() == 1 && served == previous {
        return Ok((ports(&served), vec![rejection]));
    }
    // If that is refused as well, no single entry is the cause.
    try_apply(ports(&served)).await?;
    if new.len() < 2 {
        return Ok((ports(&served), vec![rejection]));
    }
    let mut rejections = Vec::new();
    let mut pending: Vec<&[Entry]> = halves(&new).into();
    while let Some(part) = pending.pop() {
        let candidate: BTreeSet<Entry> = served.iter().chain(part).copied().collect();
        match try_apply(ports(&candidate)).await {
            Ok(()) => served = candidate,
            Err(rejection) if part.len() == 1 => rejections.push(rejection),
            Err(_) => pending.extend(halves(part)),
        }
    }
    Ok((ports(&served), rejections))
}

/// Returns the second half and then the first half, because `apply` takes the last element first.
fn halves(entries: &[Entry]) -> [&[Entry]; 2] {
    let (first, second) = entries.split_at(entries.len() / 2);
    [second, first]
}

fn entries(ports: &NodePorts) -> BTreeSet<Entry> {
    let entries_of = |list, ports: &BTreeSet<u16>| {
        let entries = ports.iter().map(move |port| (list, *port));
        entries.collect::<Vec<_>>()
    };
    let lists = [
        entries_of(List::Http, &ports.http),
        entries_of(List::Https, &ports.https),
        entries_of(List::Loopback, &ports.loopback),
    ];
    lists.into_iter().flatten().collect()
}

fn ports(entries: &BTreeSet<Entry>) -> NodePorts {
    let ports_of = |list| {
        let ports = entries.iter().filter(move |entry| entry.0 == list);
        ports.map(|entry| entry.1).collect()
    };
    NodePorts {
        http: ports_of(List::Http),
        https: ports_of(List::Https),
        loopback: ports_of(List::Loopback),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn http(ports: &[u16]) -> NodePorts {
        NodePorts {
            http: ports.iter().copied().collect(),
            ..NodePorts::default()
        }
    }

    /// Applies a list whose ports in `taken` cannot be served. Returns the outcome and the number of attempts.
    async fn applied(
        before: &[u16],
        wanted: &[u16],
        taken: &[u16],
    ) -> (Result<(NodePorts, Vec<String>), String>, usize) {
        let mut attempts = 0;
        let attempt = async |ports: NodePorts| {
            attempts += 1;
            let refused = ports.served().find(|port| taken.contains(port));
            refused.map_or(Ok(()), |port| Err(format!("{port} is taken")))
        };
        let done = apply(&http(before), &http(wanted), attempt).await;
        (done, attempts)
    }

    #[tokio::test]
    async fn valid_entries_are_served_and_the_rest_are_named() {
        let all: Vec<u16> = (9000..9064).collect();
        let but = |taken: &[u16]| -> Vec<u16> {
            let left = all.iter().filter(|port| !taken.contains(port));
            left.copied().collect()
        };
        for taken in [&[][..], &[9000], &[9063], &[9001, 9002, 9040]] {
            let (done, attempts) = applied(&[], &all, taken).await;
            let message: Vec<_> = taken
                .iter()
                .map(|port| format!("{port} is taken"))
                .collect();
            assert_eq!(done, Ok((http(&but(taken)), message)), "{taken:?}");
            assert!(attempts <= 2 + 2 * 6 * taken.len(), "{attempts}");
        }
    }

    #[tokio::test]
    async fn removed_entries_end_and_served_ones_stay() {
        let (done, _) = applied(&[9001, 9002], &[9002, 9003], &[9003]).await;
        assert_eq!(done, Ok((http(&[9002]), vec!["9003 is taken".into()])));
        let (done, attempts) = applied(&[9001], &[9001, 9002], &[9002]).await;
        assert_eq!(done, Ok((http(&[9001]), vec!["9002 is taken".into()])));
        assert_eq!(attempts, 1, "it is the only new one");
        let (done, _) = applied(&[9001, 9002], &[9002, 9003], &[9002]).await;
        assert_eq!(done, Err("9002 is taken".into()), "nothing can be applied");
    }

    #[tokio::test]
    async fn each_port_list_is_served_separately() {
        let wanted = NodePorts {
            https: [9443].into(),
            loopback: [9001].into(),
            ..http(&[9001])
        };
        let attempt = async |ports: NodePorts| {
            let served = ports.https.is_empty().then_some(());
            served.ok_or_else(|| "no app".to_owned())
        };
        let done = apply(&NodePorts::default(), &wanted, attempt).await;
        let served = NodePorts {
            https: [].into(),
            ..wanted
        };
        assert_eq!(done, Ok((served, vec!["no app".into()])));
    }
}
