//! The cryptography of all TLS sessions and signatures.

use std::sync::{Arc, LazyLock};

use rustls::crypto::{CryptoProvider, aws_lc_rs};

/// Returns the provider: aws-lc-rs with AES-GCM first, which is the fastest by far on processors with AES instructions.
pub fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
        use aws_lc_rs::cipher_suite as suite;
        let cipher_suites = vec![
            suite::TLS13_AES_128_GCM_SHA256,
            suite::TLS13_AES_256_GCM_SHA384,
            suite::TLS13_CHACHA20_POLY1305_SHA256,
            suite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
            suite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
            suite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
            suite::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
            suite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
            suite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
        ];
        Arc::new(CryptoProvider {
            cipher_suites,
            ..aws_lc_rs::default_provider()
        })
    });
    Arc::clone(&PROVIDER)
}

/// Makes `provider` the process's default, for libraries that use the default. Later calls change nothing, so each test may
/// call it.
pub fn install_provider() {
    // Fails only if a default is already installed.
    let _ = CryptoProvider::clone(&provider()).install_default();
}
