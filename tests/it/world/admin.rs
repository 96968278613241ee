//! Requests to the admin listeners of processes. Tests repeat them until something holds, and a program for each would take
//! most of the processor's time.

use super::PATIENCE;
use http_body_util::{BodyExt, Empty};
use hyper::{Request, body::Bytes, client::conn::http1, header::HOST};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::{error::Error, net::SocketAddr};
use tokio::{net::TcpStream, task::JoinSet, time::timeout};

/// Returns the body of the response, which must be text.
///
/// # Panics
/// If there is no response.
pub(crate) async fn get(address: &str, path: &str) -> String {
    let answer = try_get(address, path).await;
    answer.unwrap_or_else(|error| panic!("http://{address}{path}: {error}"))
}

/// Returns the body of the response, which must be JSON.
///
/// # Panics
/// If there is no such response.
pub(crate) async fn json(address: &str, path: &str) -> Value {
    let body = get(address, path).await;
    serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"))
}

/// Returns the body of the response, or the reason why there is none.
pub(crate) async fn try_get(address: &str, path: &str) -> Result<String, Box<dyn Error>> {
    timeout(PATIENCE, exchange(address, path)).await?
}

async fn exchange(address: &str, path: &str) -> Result<String, Box<dyn Error>> {
    let socket = TcpStream::connect(address.parse::<SocketAddr>()?).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(socket)).await?;
    let mut tasks = JoinSet::new();
    tasks.spawn(connection);
    let request = Request::get(path).header(HOST, address);
    let answer = sender.send_request(request.body(Empty::<Bytes>::new())?);
    let body = answer.await?.into_body().collect().await?.to_bytes();
    Ok(String::from_utf8(body.into())?)
}
