//! Control plane of an edge; never in the data path of a stream.
//!
//! `dial` makes one authenticated connection to a gateway, directly or through a proxy; `tunnels` maintains tunnels on such
//! connections. `enrol` gets a certificate by a token and `csr_bootstrap` by the cluster, `renew` gets the next, and
//! `rejoin` replaces one that gateways refuse. All of them send requests by `enrol_client`. `external_certificate` is for a
//! certificate from an external CA. `identity_store` holds the identity, `gateway_list` the addresses and `trust_roots` the
//! roots. `connect_error` describes failures and the time to wait. `network_monitor` reports changes of the machine's
//! network, and `admin` serves health, metrics and status.

pub(crate) mod connect_error;
pub(crate) mod dial;
pub(crate) mod external_certificate;
pub(crate) mod gateway_list;
pub(crate) mod identity_store;

pub(crate) mod network_monitor;
pub(crate) mod tunnels;

pub(crate) mod csr_bootstrap;
pub(crate) mod enrol;
pub(crate) mod enrol_client;
pub(crate) mod rejoin;
pub(crate) mod renew;
mod trust_roots;

pub(crate) mod admin;
pub(crate) mod api_cache;
pub(crate) mod evict;
mod http_server;

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    /// Whether a file below `path` mentions `word`, which is then its path.
    fn mentions(path: &Path, word: &str) -> Option<String> {
        if path.is_dir() {
            let mut entries = fs::read_dir(path).unwrap();
            return entries.find_map(|entry| mentions(&entry.unwrap().path(), word));
        }
        let found = fs::read_to_string(path).unwrap().contains(word);
        found.then(|| path.display().to_string())
    }

    #[test]
    fn the_way_and_its_control_do_not_know_each_other() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        assert_eq!(mentions(&sources.join("proxy"), "control::"), None);
        let importing = ["crate::", "proxy"].concat();
        assert_eq!(mentions(&sources.join("control"), &importing), None);
    }
}
