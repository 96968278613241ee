//! From an app to a TCP connection: resolve, check, dial.
//!
//! The policy is asked with each resolved address, and exactly the address that it passed is dialled: what a
//! name leads to a moment later makes no difference. Everything together has one bound
//! (`timeouts.dial`), shared out among the addresses that are left to try.

use super::{Policy, app::App};
use causeway_tunnel::{Refusal, error::Refused, socket};
use std::{io, net::SocketAddr, time::Duration};
use tokio::{
    net::TcpStream,
    time::{Instant, timeout_at},
};

/// Dials `app`, until `deadline`.
pub(super) async fn dial(
    policy: &Policy,
    app: &App,
    deadline: Instant,
) -> Result<TcpStream, Refused> {
    let addresses = resolve(app, deadline).await?;
    let allowed: Vec<SocketAddr> = addresses
        .into_iter()
        .filter_map(|address| policy.check(app, address))
        .collect();
    let mut refused = None;
    for (tried, address) in allowed.iter().enumerate() {
        let left = deadline.saturating_duration_since(Instant::now());
        let share = left / u32::try_from(allowed.len() - tried).unwrap_or(u32::MAX);
        match timeout_at(Instant::now() + share, TcpStream::connect(*address)).await {
            Ok(Ok(tcp)) => {
                if address.ip().is_loopback() {
                    socket::tune_near(&tcp);
                } else {
                    socket::tune(&tcp);
                }
                return Ok(tcp);
            }
            Ok(Err(error)) => refused = Some(failed(app, &error)),
            Err(_) => refused = Some(slow(app, "did not take the connection in time")),
        }
    }
    Err(refused.unwrap_or_else(|| policy.forbidden(&app.target)))
}

async fn resolve(app: &App, deadline: Instant) -> Result<Vec<SocketAddr>, Refused> {
    let (host, port) = (app.target.host.as_str(), app.target.port);
    if let Some(ip) = app.target.ip() {
        let all = [ip].into_iter().chain(app.also.iter().copied());
        return Ok(all.map(|ip| SocketAddr::new(ip, port)).collect());
    }
    match timeout_at(deadline, causeway_resolve::resolve(host, port)).await {
        Ok(Ok(addresses)) => Ok(addresses),
        Ok(Err(error)) => {
            let detail = format!("{} could not resolve {host}: {error}", app.node);
            Err(Refusal::TargetRefused.because(detail))
        }
        Err(_) => Err(slow(app, "has a name that was not resolved in time")),
    }
}

fn failed(app: &App, error: &io::Error) -> Refused {
    let refusal = match error.kind() {
        io::ErrorKind::TimedOut => Refusal::TargetTimeout,
        _ => Refusal::TargetRefused,
    };
    refusal.because(format!(
        "{} could not dial {}: {}",
        app.node,
        app.target,
        reason(error)
    ))
}

/// The error as a person says it, without the system's number where there is a word.
pub(super) fn reason(error: &io::Error) -> String {
    match error.kind() {
        kind @ (io::ErrorKind::ConnectionRefused
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::HostUnreachable
        | io::ErrorKind::NetworkUnreachable
        | io::ErrorKind::TimedOut
        | io::ErrorKind::UnexpectedEof) => kind.to_string(),
        _ => error.to_string(),
    }
}

pub(super) fn slow(app: &App, what: &str) -> Refused {
    Refusal::TargetTimeout.because(format!("{} {what}", app.sentence()))
}

/// The moment at which `bound` has passed from now.
pub(super) fn deadline(bound: Duration) -> Instant {
    Instant::now() + bound
}
