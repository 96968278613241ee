//! A real etcd of one member, on loopback, without TLS. The tests of the engine have one with TLS.

use super::{tool::Running, tool::Tool, until};
use std::net::{Ipv4Addr, TcpListener};
use tempfile::TempDir;
use tokio::net::TcpStream;

pub(crate) struct Etcd {
    folder: TempDir,
    port: u16,
    server: Option<Running>,
}

impl Etcd {
    pub(crate) async fn start() -> Self {
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut etcd = Self {
            folder: tempfile::tempdir().unwrap(),
            port: port.local_addr().unwrap().port(),
            server: None,
        };
        drop(port);
        etcd.start_again().await;
        etcd
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Kills it. Its data stay.
    pub(crate) fn stop(&mut self) {
        self.server = None;
    }

    /// Starts it with its data, at the same port.
    pub(crate) async fn start_again(&mut self) {
        let url = self.url();
        // Nobody reads its log.
        let etcd = Tool::new("sh")
            .args(["-c", "exec etcd \"$@\" >/dev/null 2>&1", "etcd"])
            .args([
                "--data-dir".as_ref(),
                self.folder.path().join("data").as_os_str(),
            ])
            .args([
                "--listen-client-urls",
                &url,
                "--advertise-client-urls",
                &url,
            ])
            // The only member dials no peer, so the announced port may be a wrong one.
            .args(["--listen-peer-urls", "http://127.0.0.1:0"])
            .args(["--initial-advertise-peer-urls", "http://127.0.0.1:1"])
            .args(["--initial-cluster", "default=http://127.0.0.1:1"])
            .args(["--heartbeat-interval", "20", "--election-timeout", "200"]);
        self.server = Some(etcd.start());
        let is_open = async || {
            TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))
                .await
                .is_ok()
        };
        until("etcd listens", is_open).await;
    }
}
