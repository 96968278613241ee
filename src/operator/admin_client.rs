//! One request to the admin listener of a running process.
//!
//! The address is given by flag or environment, or is read from the data directory, to which a running gateway, edge or demo
//! writes it. The data directory also has a unix socket, to which only its owner and root can connect. The request is sent to
//! the socket first. So other users of the machine cannot block a command by taking all connections of the admin listener.
//! Each error states the address, its origin, and what to do.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fmt, io};

use anyhow::{Context, bail};
use causeway_certs::{OpenMode, Store, StoreError};
use causeway_config::host_port;
use causeway_rt::{happy_eyeballs, http_client};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode, header};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

/// Name of the file in the data directory that contains the admin address of the running process.
pub(super) const ADMIN_ADDRESS_FILE: &str = Store::ADMIN_ADDRESS;

/// Maximum time for a response. A process on the same machine that needs longer is stuck.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Address and socket of the admin listener of a running process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AdminAddress {
    /// Address of the admin listener, `HOST:PORT`.
    address: String,
    /// Socket in the data directory, if the process was found by its data directory.
    socket: Option<PathBuf>,
}

impl From<String> for AdminAddress {
    fn from(address: String) -> Self {
        Self {
            address,
            socket: None,
        }
    }
}

impl fmt::Display for AdminAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

/// Returns the admin address, and a description of its origin.
pub(super) fn find_address(
    admin_flag: Option<String>,
    data_dir: &Path,
) -> anyhow::Result<(AdminAddress, String)> {
    if let Some(address) = admin_flag {
        return Ok((address.into(), "from --admin".into()));
    }
    let remedy =
        "give its admin address with --admin HOST:PORT, or its data directory with --data-dir DIR";
    match address_from_data_dir(data_dir).context(remedy)? {
        Some(address) => Ok((
            address,
            format!("from the data directory {}", data_dir.display()),
        )),
        None => bail!(
            "no gateway or edge runs in {}; {remedy}",
            data_dir.display()
        ),
    }
}

/// Removes the admin address and socket of a process that ends.
pub(super) fn remove_address(store: &Store) -> Result<(), StoreError> {
    store.remove_runtime(ADMIN_ADDRESS_FILE)?;
    // A leftover socket does no harm; the next process replaces it.
    let _ = std::fs::remove_file(store.admin_socket());
    Ok(())
}

/// Returns the admin address of the process that runs on a data directory, if both exist.
pub(super) fn address_from_data_dir(data_dir: &Path) -> anyhow::Result<Option<AdminAddress>> {
    let stored = Store::open(data_dir, OpenMode::Existing).and_then(|store| {
        let address = store.read_runtime(ADMIN_ADDRESS_FILE)?;
        Ok(address.map(|address| AdminAddress {
            address: address.trim().to_owned(),
            socket: Some(store.admin_socket()),
        }))
    });
    match stored {
        Ok(address) => Ok(address),
        Err(StoreError::Missing { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Whether this user may not read the data directory.
pub(super) fn is_denied(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let cause = cause.downcast_ref::<io::Error>();
        cause.is_some_and(|cause| cause.kind() == io::ErrorKind::PermissionDenied)
    })
}

/// Sends a GET request and returns the status and body of the response.
pub(super) async fn get(address: &AdminAddress, path: &str) -> anyhow::Result<(StatusCode, Bytes)> {
    request(Method::GET, address, path).await
}

/// Sends a GET request to a process in the PID namespace of this one, which is its container. Two containers have the same
/// data directory while one gateway takes over from the other, and only one of them listens there.
pub(super) async fn get_from_same_container(
    address: &AdminAddress,
    path: &str,
) -> anyhow::Result<(StatusCode, Bytes)> {
    let socket = address.socket.as_deref().context("no data directory")?;
    let attempt = async {
        let stream = UnixStream::connect(socket)
            .await
            .with_context(|| format!("cannot connect to {}", socket.display()))?;
        // The system reports 0 for a process outside of this namespace.
        if stream.peer_cred()?.pid().is_none_or(|pid| pid == 0) {
            bail!("the process at {address} runs in another container");
        }
        exchange(Method::GET, stream, (address, path)).await
    };
    within_request_timeout(address, attempt).await
}

/// Sends a request and returns the status and body of the response.
pub(super) async fn request(
    method: Method,
    address: &AdminAddress,
    path: &str,
) -> anyhow::Result<(StatusCode, Bytes)> {
    let attempt = async {
        if let Some(socket) = &address.socket
            && let Ok(stream) = UnixStream::connect(socket).await
        {
            return exchange(method, stream, (address, path)).await;
        }
        exchange(method, connect(&address.address).await?, (address, path)).await
    };
    within_request_timeout(address, attempt).await
}

async fn within_request_timeout<T>(
    address: &AdminAddress,
    attempt: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    tokio::time::timeout(REQUEST_TIMEOUT, attempt)
        .await
        .with_context(|| format!("{address} did not answer within {REQUEST_TIMEOUT:?}"))?
}

async fn connect(address: &str) -> anyhow::Result<TcpStream> {
    let (host, port) = host_port(address).map_err(anyhow::Error::msg)?;
    happy_eyeballs::connect(host, port, REQUEST_TIMEOUT)
        .await
        .with_context(|| format!("cannot connect to {address}; is the process running?"))
}

async fn exchange(
    method: Method,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    (address, path): (&AdminAddress, &str),
) -> anyhow::Result<(StatusCode, Bytes)> {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, &address.address)
        .body(Full::<Bytes>::default())?;
    let sending = async {
        let (response, _connection) = http_client::send(stream, request).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        Ok::<_, hyper::Error>((status, body))
    };
    sending.await.with_context(|| {
        format!(
            "the response of {address} is not that of an admin listener; is it the admin address?"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    /// Returns the result of `get` for a given response.
    async fn answered(answer: &str) -> anyhow::Result<(StatusCode, Bytes)> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let place = AdminAddress::from(listener.local_addr()?.to_string());
        let serve = async {
            let (mut stream, _) = listener.accept().await?;
            let mut request = [0; 1024];
            let read = stream.read(&mut request).await?;
            assert!(request[..read].starts_with(b"GET /healthz HTTP/1.1\r\n"));
            stream.write_all(answer.as_bytes()).await
        };
        let (asked, served) = tokio::join!(get(&place, "/healthz"), serve);
        served?;
        asked
    }

    #[tokio::test]
    async fn an_answer_comes_back_with_its_status() {
        let answer = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\nno";
        let (status, body) = answered(answer).await.unwrap();
        assert_eq!(
            (status, &body[..]),
            (StatusCode::SERVICE_UNAVAILABLE, &b"no"[..])
        );
    }

    #[tokio::test]
    async fn an_address_without_admin_listener_is_reported() {
        let error = answered("SSH-2.0-OpenSSH\r\n").await.unwrap_err();
        assert!(
            format!("{error:#}").contains("is not that of an admin listener"),
            "{error:#}"
        );
    }

    #[test]
    fn an_explicit_address_wins() {
        let found = find_address(Some("127.0.0.1:1".into()), Path::new("/nowhere")).unwrap();
        assert_eq!(found.0, AdminAddress::from("127.0.0.1:1".to_owned()));
    }

    #[test]
    fn where_no_gateway_runs_the_remedy_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let error = find_address(None, folder.path()).unwrap_err();
        assert!(
            format!("{error:#}").contains("--admin HOST:PORT"),
            "{error:#}"
        );
    }
}
