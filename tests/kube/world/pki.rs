//! The cluster's certificates: one CA, and its certificates for API server, kubelets, nodes and clients.
//!
//! All files are in one folder, with the name of their holder: `NAME.pem` and `NAME.key`. Keys never leave it.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};

/// A CA with its folder.
pub(crate) struct Pki {
    folder: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl Pki {
    /// A new CA, whose certificate is `ca.pem`, and the key of service accounts, `sa.key`.
    pub(crate) fn new(folder: &Path) -> Self {
        fs::create_dir_all(folder).unwrap();
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, "cluster-ca");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        fs::write(folder.join("ca.pem"), certificate.pem()).unwrap();
        fs::write(folder.join("ca.key"), key.serialize_pem()).unwrap();
        let accounts = KeyPair::generate().unwrap();
        fs::write(folder.join("sa.key"), accounts.serialize_pem()).unwrap();
        fs::write(folder.join("sa.pub"), accounts.public_key_pem()).unwrap();
        Self {
            folder: folder.to_owned(),
            issuer: Issuer::new(params, key),
        }
    }

    /// A file of the folder.
    pub(crate) fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    /// The certificate of a server, for these names and addresses.
    pub(crate) fn server(&self, file: &str, names: &[&str], addresses: &[IpAddr]) {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        let addresses = addresses.iter().copied().map(SanType::IpAddress);
        params.subject_alt_names.extend(addresses);
        params.distinguished_name.push(DnType::CommonName, file);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(file, &params);
    }

    /// The certificate of a client.
    pub(crate) fn client(&self, file: &str, user: &str, group: Option<&str>) {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, user);
        if let Some(group) = group {
            params
                .distinguished_name
                .push(DnType::OrganizationName, group);
        }
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(file, &params);
    }

    /// A new key for a client, and the request for its certificate.
    pub(crate) fn request(&self, file: &str, user: &str) -> String {
        let key = KeyPair::generate().unwrap();
        fs::write(self.path(&format!("{file}.key")), key.serialize_pem()).unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, user);
        params.serialize_request(&key).unwrap().pem().unwrap()
    }

    fn sign(&self, file: &str, params: &CertificateParams) {
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        fs::write(self.path(&format!("{file}.pem")), certificate.pem()).unwrap();
        fs::write(self.path(&format!("{file}.key")), key.serialize_pem()).unwrap();
    }

    /// A kubeconfig with which the client of this file reaches the API server.
    pub(crate) fn kubeconfig(&self, client: &str, server: &str) -> String {
        let path = self.path(&format!("{client}.kubeconfig"));
        let (ca, cert) = (self.path("ca.pem"), self.path(&format!("{client}.pem")));
        let key = self.path(&format!("{client}.key"));
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: it\n\
             clusters: [{{ name: it, cluster: {{ server: '{server}', certificate-authority: {ca} }} }}]\n\
             users: [{{ name: it, user: {{ client-certificate: {cert}, client-key: {key} }} }}]\n\
             contexts: [{{ name: it, context: {{ cluster: it, user: it }} }}]\n"
        );
        fs::write(&path, text).unwrap();
        path
    }
}
