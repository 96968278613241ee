//! A real etcd of one member, on loopback, without TLS. The tests of the engine have one with TLS.

use super::{tool::Running, tool::Tool, until};
use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
};
use tempfile::TempDir;
use test_summary::unused_port;
use tokio::net::TcpStream;

pub(crate) struct Etcd {
    folder: TempDir,
    port: u16,
    server: Option<Running>,
}

impl Etcd {
    pub(crate) async fn start() -> Self {
        let mut etcd = Self {
            folder: tempfile::tempdir().unwrap(),
            port: unused_port(),
            server: None,
        };
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

    /// Kills it, waits for its end, and returns a copy of its data.
    pub(crate) async fn stop_and_copy(&mut self) -> TempDir {
        self.stop();
        until("etcd has ended", async || !self.is_open().await).await;
        let copy = tempfile::tempdir().unwrap();
        copy_data(&self.folder, &copy).await;
        copy
    }

    /// Replaces its data by a copy, and starts it.
    pub(crate) async fn restore(&mut self, copy: &TempDir) {
        self.stop_and_copy().await;
        fs::remove_dir_all(self.folder.path().join("data")).unwrap();
        copy_data(copy, &self.folder).await;
        self.start_again().await;
    }

    pub(crate) fn address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.port))
    }

    async fn is_open(&self) -> bool {
        TcpStream::connect(self.address()).await.is_ok()
    }

    /// Starts it with its data, at the same port, after the previous process has ended.
    pub(crate) async fn start_again(&mut self) {
        until("the port is free", async || !self.is_open().await).await;
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
        until("etcd listens", async || self.is_open().await).await;
    }
}

async fn copy_data(from: &TempDir, to: &TempDir) {
    let data = from.path().join("data");
    let copy = Tool::new("cp").args(["-a".as_ref(), data.as_os_str(), to.path().as_os_str()]);
    copy.run().await.ok();
}
