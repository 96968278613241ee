//! Resolution of names to addresses, without a cache: each call queries again, so that a wrong or failed response does not
//! persist.
//!
//! The system's resolver (`getaddrinfo`) knows every source of names that the machine's owner has configured, and is used if
//! there is one. A static binary has none, because glibc loads those sources as shared objects. With the feature
//! `own-resolver`, this module uses `/etc/hosts` and the name servers of `/etc/resolv.conf` directly. Both files are read at
//! each call, since a change of network changes them.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

#[cfg(all(
    target_env = "gnu",
    target_feature = "crt-static",
    not(feature = "own-resolver")
))]
compile_error!("a static binary on glibc cannot use getaddrinfo: add --features own-resolver");

/// Returns the addresses of `host`, a name or an address (IPv6 without brackets), in the order in which to try them; at least
/// one.
///
/// Takes as long as the system's resolver. The calling code has a time limit of its own.
///
/// # Errors
/// If the name has no address, or no name server responds. The text states which.
pub async fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let addresses = look_up(host, port).await?;
    if addresses.is_empty() {
        let message = format!("{host} has no address");
        return Err(io::Error::new(io::ErrorKind::NotFound, message));
    }
    Ok(addresses)
}

#[cfg(not(feature = "own-resolver"))]
async fn look_up(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    Ok(tokio::net::lookup_host((host, port)).await?.collect())
}

#[cfg(feature = "own-resolver")]
async fn look_up(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    own::look_up(host, port).await
}

#[cfg(feature = "own-resolver")]
mod own {
    use hickory_resolver::{
        TokioResolver,
        config::{LookupIpStrategy, ResolverConfig, ResolverOpts, ServerOrderingStrategy},
        net::{NetError, runtime::TokioRuntimeProvider},
        system_conf::read_system_conf,
    };
    use std::{io, net::SocketAddr};

    pub(super) async fn look_up(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        // Without name servers `/etc/hosts` is still used.
        let (servers, config_error) = match read_system_conf() {
            Ok(servers) => (servers, None),
            Err(error) => {
                let none = ResolverConfig::from_parts(None, Vec::new(), Vec::new());
                ((none, ResolverOpts::default()), Some(error))
            }
        };
        let resolver = resolver(servers).map_err(io::Error::other)?;
        match resolver.lookup_ip(host).await {
            Ok(found) => Ok(found
                .iter()
                .map(|address| SocketAddr::new(address, port))
                .collect()),
            Err(error) => Err(to_io_error(host, &error, config_error)),
        }
    }

    fn resolver(
        (config, mut options): (ResolverConfig, ResolverOpts),
    ) -> Result<TokioResolver, NetError> {
        options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
        options.server_ordering_strategy = ServerOrderingStrategy::UserProvidedOrder;
        // No cache, so that wrong responses are not kept.
        options.cache_size = 0;
        let mut builder =
            TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
        *builder.options_mut() = options;
        builder.build()
    }

    fn to_io_error(host: &str, error: &NetError, config_error: Option<NetError>) -> io::Error {
        if let Some(config_error) = config_error {
            return io::Error::other(format!(
                "{host} is not in /etc/hosts, and /etc/resolv.conf contains no name server: {config_error}"
            ));
        }
        match error {
            NetError::Timeout => io::Error::new(
                io::ErrorKind::TimedOut,
                "no name server of /etc/resolv.conf has responded",
            ),
            NetError::Dns(_) if error.is_no_records_found() => io::Error::new(
                io::ErrorKind::NotFound,
                "the name servers of /etc/resolv.conf have no such name",
            ),
            other => io::Error::other(other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_address_maps_to_itself_and_localhost_to_loopback() {
        let found = resolve("::1", 80).await.unwrap();
        assert_eq!(found, ["[::1]:80".parse().unwrap()]);
        let found = resolve("localhost", 443).await.unwrap();
        assert!(
            found
                .iter()
                .all(|address| address.ip().is_loopback() && address.port() == 443)
        );
    }

    #[tokio::test]
    async fn a_name_that_leads_nowhere_is_an_error() {
        // RFC 6761 section 6.4: no resolver may know a name in `invalid`.
        assert!(resolve("edge-1.invalid", 80).await.is_err());
        assert!(resolve("no name at all", 80).await.is_err());
    }
}
