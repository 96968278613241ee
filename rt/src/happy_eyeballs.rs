//! Connections to the first address of a host that answers, as in RFC 8305 (Happy Eyeballs).
//!
//! IPv6 and IPv4 alternate. If an attempt has not connected after 250 ms, another one starts at the next address. So an address
//! that drops packets delays a connection, but does not prevent it.

use crate::resolve;
use futures_util::{StreamExt, future::pending, stream::FuturesUnordered};
use std::{collections::VecDeque, io, net::SocketAddr, time::Duration};
use tokio::{
    net::TcpStream,
    time::{sleep, timeout},
};

/// Delay before an attempt at the next address starts in parallel (RFC 8305 section 5, "Connection Attempt Delay").
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Resolves a host, and connects to the first of its addresses that answers. Each attempt ends after `attempt_timeout`. The time
/// of the system's resolver comes in addition.
///
/// # Errors
/// The error of the resolver, or of the address that failed last.
pub async fn connect(host: &str, port: u16, attempt_timeout: Duration) -> io::Result<TcpStream> {
    connect_any(resolve(host, port).await?, attempt_timeout).await
}

async fn connect_any(
    addresses: Vec<SocketAddr>,
    attempt_timeout: Duration,
) -> io::Result<TcpStream> {
    let mut addresses = interleave_families(addresses, SocketAddr::is_ipv6);
    let connect = |address| connect_within(address, attempt_timeout);
    let (connected, mut errors) = race(&mut addresses, connect).await;
    let last_error = || {
        errors
            .pop()
            .unwrap_or_else(|| io::ErrorKind::NotFound.into())
    };
    connected.map(|(_, tcp)| tcp).ok_or_else(last_error)
}

/// Connects to one address within this time.
///
/// # Errors
/// If the address does not accept the connection; `TimedOut` if it does not answer.
pub async fn connect_within(address: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    timeout(limit, TcpStream::connect(address))
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Orders addresses so that IPv6 and IPv4 alternate, beginning with the family of the first one (RFC 8305 section 4). Each
/// family keeps its order.
pub fn interleave_families<P>(addresses: Vec<P>, is_v6: impl Fn(&P) -> bool) -> VecDeque<P> {
    let first = addresses.first().is_some_and(&is_v6);
    let (own, other): (Vec<_>, Vec<_>) = addresses.into_iter().partition(|it| is_v6(it) == first);
    let (mut own, mut other) = (own.into_iter(), other.into_iter());
    let mut all = VecDeque::new();
    loop {
        let pair = [own.next(), other.next()];
        if pair.iter().all(Option::is_none) {
            return all;
        }
        all.extend(pair.into_iter().flatten());
    }
}

/// Connects to the addresses in their order. The next attempt starts when one has failed or has taken `ATTEMPT_DELAY`. Returns
/// the first connection, and the errors of the addresses that failed. Addresses that were not tried to the end stay in
/// `addresses`.
pub async fn race<P: Clone + PartialEq, T, E, F: Future<Output = Result<T, E>>>(
    addresses: &mut VecDeque<P>,
    connect: impl Fn(P) -> F,
) -> (Option<(P, T)>, Vec<E>) {
    let (mut errors, mut connected) = (Vec::new(), None);
    let mut started: Vec<P> = Vec::new();
    let mut attempts = FuturesUnordered::new();
    while connected.is_none() {
        if let Some(addr) = addresses.pop_front() {
            started.push(addr.clone());
            let connecting = connect(addr.clone());
            attempts.push(async move { (addr, connecting.await) });
        } else if attempts.is_empty() {
            break;
        }
        let next_attempt = async {
            if addresses.is_empty() {
                pending::<()>().await;
            }
            sleep(ATTEMPT_DELAY).await;
        };
        tokio::select! {
            biased;
            Some((addr, done)) = attempts.next() => {
                started.retain(|it| *it != addr);
                match done {
                    Ok(done) => connected = Some((addr, done)),
                    Err(error) => errors.push(error),
                }
            }
            () = next_attempt => {}
        }
    }
    // The unfinished attempts come first again.
    for addr in started.into_iter().rev() {
        addresses.push_front(addr);
    }
    (connected, errors)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::{
        net::{TcpListener, TcpSocket},
        time::Instant,
    };

    #[test]
    fn families_alternate_from_the_first_on() {
        let all = interleave_families(vec![6, 6, 6, 4], |family| *family == 6);
        assert_eq!(all, [6, 4, 6, 6]);
        let all = interleave_families(vec![4, 6, 6], |family| *family == 6);
        assert_eq!(all, [4, 6, 6]);
    }

    /// The address `silent` drops the packets of an attempt and never answers.
    #[tokio::test(start_paused = true)]
    async fn a_silent_address_delays_the_next_by_250_milliseconds() {
        let started = Instant::now();
        let connect = async |place| match place {
            "silent" => pending().await,
            "refused" => Err("refused"),
            _ => Ok(()),
        };
        let mut places = VecDeque::from(["silent", "refused", "good", "unused"]);
        let (connected, errors) = race(&mut places, connect).await;
        assert_eq!((connected, errors), (Some(("good", ())), vec!["refused"]));
        assert_eq!(started.elapsed(), ATTEMPT_DELAY);
        assert_eq!(
            places,
            ["silent", "unused"],
            "for when the good one is no gateway"
        );

        let mut places = VecDeque::from(["refused"]);
        let (connected, errors) = race(&mut places, connect).await;
        assert_eq!((connected, errors), (None, vec!["refused"]));
    }

    /// A listener whose queue is full drops further attempts.
    #[tokio::test]
    async fn a_host_is_reached_although_its_first_address_is_silent() {
        let silent = TcpSocket::new_v4().unwrap();
        silent.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let silent = silent.listen(0).unwrap();
        let first = silent.local_addr().unwrap();
        let _queued = TcpStream::connect(first).await.unwrap();
        let good = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let second = good.local_addr().unwrap();
        let limit = Duration::from_mins(1);
        let connected = connect_any(vec![first, second], limit).await;
        assert_eq!(connected.unwrap().peer_addr().unwrap(), second);

        let limit = Duration::from_millis(300);
        let error = connect_any(vec![first], limit).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(good);
        let error = connect_any(vec![second], limit).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
