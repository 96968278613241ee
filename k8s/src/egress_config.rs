//! Egress selector configuration with which kube-apiserver sends connections into its cluster through a `connect` listener.
//!
//! The result is a text: an `EgressSelectorConfiguration` (`apiserver.k8s.io/v1beta1`) for `--egress-selector-config-file`.
//! It has only the `cluster` selection: kubelets, pods, Services, webhooks and aggregated APIs. kube-apiserver decodes the
//! file strictly, so the fields are written exactly.

use std::fmt;

/// Address of the listener, for kube-apiserver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// A unix socket on the same host.
    Socket(String),
    /// TLS. kube-apiserver presents a certificate, and reads all files once, at its start.
    Tls {
        /// `https://HOST:PORT`.
        url: String,
        /// File of the CA that has signed the listener's certificate. `None` stands for the system's roots.
        ca: Option<String>,
        /// File of kube-apiserver's certificate.
        certificate: String,
        /// File of the key of that certificate.
        key: String,
        /// Name in the listener's certificate, if the URL has another.
        name: Option<String>,
    },
}

impl Endpoint {
    /// Checks whether kube-apiserver would accept the configuration.
    ///
    /// # Errors
    /// A description of the fault, with the text to write instead.
    pub fn check(&self) -> Result<(), String> {
        let files: Vec<&str> = match self {
            Self::Socket(path) => vec![path],
            Self::Tls {
                url,
                ca,
                certificate,
                key,
                ..
            } => {
                let host_port = url.strip_prefix("https://").unwrap_or_default();
                let (host, port) = host_port.rsplit_once(':').unwrap_or_default();
                if host.is_empty() || port.parse::<u16>().is_err() {
                    return Err(format!(
                        "\"{url}\" does not have the form https://HOST:PORT, and kube-apiserver accepts no other"
                    ));
                }
                let mut files = vec![certificate.as_str(), key];
                files.extend(ca.as_deref());
                files
            }
        };
        match files.into_iter().find(|path| !path.starts_with('/')) {
            Some(path) => Err(format!(
                "\"{path}\" is not an absolute path on the host of kube-apiserver"
            )),
            None => Ok(()),
        }
    }
}

/// Writes the configuration in YAML.
impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "apiVersion: apiserver.k8s.io/v1beta1\n\
             kind: EgressSelectorConfiguration\n\
             egressSelections:\n\
             - name: cluster\n  connection:\n    proxyProtocol: HTTPConnect\n    transport:\n",
        )?;
        match self {
            Self::Socket(path) => write!(f, "      uds:\n        udsName: {}\n", YamlString(path)),
            Self::Tls {
                url,
                ca,
                certificate,
                key,
                name,
            } => {
                write!(
                    f,
                    "      tcp:\n        url: {}\n        tlsConfig:\n",
                    YamlString(url)
                )?;
                if let Some(ca) = ca {
                    writeln!(f, "          caBundle: {}", YamlString(ca))?;
                }
                writeln!(f, "          clientCert: {}", YamlString(certificate))?;
                writeln!(f, "          clientKey: {}", YamlString(key))?;
                match name {
                    Some(name) => writeln!(f, "          tlsServerName: {}", YamlString(name)),
                    None => Ok(()),
                }
            }
        }
    }
}

/// Text in YAML's double-quoted style (YAML 1.2 §7.3.1).
struct YamlString<'a>(&'a str);

impl fmt::Display for YamlString<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\"")?;
        for ch in self.0.chars() {
            match ch {
                '"' | '\\' => write!(f, "\\{ch}")?,
                ch if ch.is_control() => write!(f, "\\U{:08x}", u32::from(ch))?,
                ch => write!(f, "{ch}")?,
            }
        }
        f.write_str("\"")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tls() -> Endpoint {
        Endpoint::Tls {
            url: "https://10.0.0.2:10264".to_owned(),
            ca: Some("/etc/causeway/ca.pem".to_owned()),
            certificate: "/etc/kubernetes/pki/egress.crt".to_owned(),
            key: "/etc/kubernetes/pki/egress.key".to_owned(),
            name: Some("gateway".to_owned()),
        }
    }

    #[test]
    fn the_written_file_decodes_in_kube_apiserver() {
        assert_eq!(
            tls().to_string(),
            r#"apiVersion: apiserver.k8s.io/v1beta1
kind: EgressSelectorConfiguration
egressSelections:
- name: cluster
  connection:
    proxyProtocol: HTTPConnect
    transport:
      tcp:
        url: "https://10.0.0.2:10264"
        tlsConfig:
          caBundle: "/etc/causeway/ca.pem"
          clientCert: "/etc/kubernetes/pki/egress.crt"
          clientKey: "/etc/kubernetes/pki/egress.key"
          tlsServerName: "gateway"
"#
        );
        let socket = Endpoint::Socket("/run/\"x\"/listener.sock".to_owned());
        let text = socket.to_string();
        assert!(
            text.ends_with("uds:\n        udsName: \"/run/\\\"x\\\"/listener.sock\"\n"),
            "{text}"
        );
    }

    #[test]
    fn a_file_that_kube_apiserver_rejects_is_refused() {
        tls().check().unwrap();
        let with = |change: fn(&mut Endpoint)| {
            let mut listener = tls();
            change(&mut listener);
            listener.check().unwrap_err()
        };
        for url in [
            "http://10.0.0.2:1",
            "https://10.0.0.2",
            "https://:1",
            "10.0.0.2:1",
        ] {
            let mut listener = tls();
            if let Endpoint::Tls { url: own, .. } = &mut listener {
                url.clone_into(own);
            }
            assert!(
                listener.check().unwrap_err().contains("https://HOST:PORT"),
                "{url}"
            );
        }
        let relative = with(|listener| {
            if let Endpoint::Tls { key, .. } = listener {
                *key = "egress.key".to_owned();
            }
        });
        assert!(relative.contains("not an absolute path"), "{relative}");
        assert!(
            Endpoint::Socket("listener.sock".to_owned())
                .check()
                .is_err()
        );
    }
}
