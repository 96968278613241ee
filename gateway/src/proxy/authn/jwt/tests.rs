use super::*;
use crate::proxy::authn::identity::now;
use crate::state::JwksWriter;
use aws_lc_rs::{
    encoding::{AsDer, Pkcs8V1Der},
    rand::SystemRandom,
    rsa::{KeyPair, KeySize},
    signature::{
        ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED_SIGNING, EcdsaKeyPair,
        Ed25519KeyPair,
    },
};
use causeway_certs::TrustDomain;
use jsonwebtoken::{EncodingKey, encode, jwk::Jwk};
use serde_json::json;
use std::sync::LazyLock;

const BOUND: Duration = Duration::from_secs(3);
const ISSUER: &str = "https://id.test";

/// Key pair, generated once for all tests.
struct Pair {
    algorithm: Algorithm,
    id: &'static str,
    key: EncodingKey,
}

static RSA: LazyLock<Pair> = LazyLock::new(|| {
    let pair = KeyPair::generate(KeySize::Rsa2048).unwrap();
    let pkcs8: Pkcs8V1Der<'_> = pair.as_der().unwrap();
    // PKCS#8 contains PKCS#1 after 26 bytes.
    let key = EncodingKey::from_rsa_der(&pkcs8.as_ref()[26..]);
    Pair {
        algorithm: Algorithm::RS256,
        id: "rsa",
        key,
    }
});

static EC: LazyLock<Pair> = LazyLock::new(|| {
    let pkcs8 =
        EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &SystemRandom::new());
    Pair {
        algorithm: Algorithm::ES256,
        id: "ec",
        key: EncodingKey::from_ec_der(pkcs8.unwrap().as_ref()),
    }
});

static EC384: LazyLock<Pair> = LazyLock::new(|| {
    let pkcs8 =
        EcdsaKeyPair::generate_pkcs8(&ECDSA_P384_SHA384_FIXED_SIGNING, &SystemRandom::new());
    Pair {
        algorithm: Algorithm::ES384,
        id: "ec384",
        key: EncodingKey::from_ec_der(pkcs8.unwrap().as_ref()),
    }
});

fn ed(id: &'static str) -> Pair {
    let pkcs8 = Ed25519KeyPair::generate_pkcs8v1(&SystemRandom::new()).unwrap();
    Pair {
        algorithm: Algorithm::EdDSA,
        id,
        key: EncodingKey::from_ed_der(pkcs8.as_ref()),
    }
}

static ED: LazyLock<Pair> = LazyLock::new(|| ed("ed"));

impl Pair {
    fn sign(&self, claims: &Value) -> String {
        self.sign_as(self.algorithm, Some(self.id), claims)
    }

    fn sign_as(&self, algorithm: Algorithm, id: Option<&str>, claims: &Value) -> String {
        let mut header = Header::new(algorithm);
        header.kid = id.map(str::to_owned);
        encode(&header, claims, &self.key).unwrap()
    }
}

fn set<'a>(pairs: impl IntoIterator<Item = &'a Pair>) -> KeySet {
    let public = |pair: &Pair| {
        let mut jwk = Jwk::from_encoding_key(&pair.key, pair.algorithm).unwrap();
        jwk.common.key_id = Some(pair.id.to_owned());
        // An RSA key of the set verifies all of its algorithms.
        jwk.common.key_algorithm = None;
        jwk
    };
    let keys: Vec<_> = pairs.into_iter().map(public).collect();
    KeySet::parse(json!({ "keys": keys }).to_string().as_bytes()).unwrap()
}

fn issuer(name: &str, keys: JwksCache) -> Issuer {
    let naming = ClaimMappings {
        username_claim: "sub".into(),
        username_prefix: None,
        groups_claim: "groups".into(),
        groups_prefix: None,
        trust_domain: TrustDomain::parse("world.test").unwrap(),
    };
    let audiences = ["causeway".to_owned(), "other".to_owned()];
    Issuer::new((name, &audiences), &config::Algorithm::ALL, naming, keys)
}

fn all() -> JwtAuthenticator {
    let keys = JwksCache::fixed(set([&*RSA, &*EC, &*EC384, &*ED]));
    JwtAuthenticator::new(vec![issuer(ISSUER, keys)])
}

fn claims(more: &Value) -> Value {
    let mut claims = json!({ "iss": ISSUER, "aud": "causeway", "sub": "ann", "exp": now() + 600, "groups": ["ops"] });
    let more = more.as_object().unwrap().clone();
    claims.as_object_mut().unwrap().extend(more);
    claims
}

fn good() -> Value {
    claims(&json!({}))
}

async fn proven(jwts: &JwtAuthenticator, token: &str) -> Result<JwtIdentity, Rejection> {
    jwts.identify((token, Expired::Reject), BOUND).await
}

async fn refusal(jwts: &JwtAuthenticator, token: &str) -> String {
    let refused = match proven(jwts, token).await.unwrap_err() {
        Rejection::Invalid(why) => why,
        Rejection::DependencyUnavailable(why) => format!("dependency_unavailable: {why}").into(),
    };
    for part in token.split('.').filter(|part| part.len() > 3) {
        assert!(!refused.contains(part), "{refused}");
    }
    refused.into_owned()
}

#[tokio::test]
async fn a_token_is_accepted_for_every_key_type_of_its_issuer() {
    let jwts = all();
    for (pair, algorithm) in [
        (&*RSA, Algorithm::RS256),
        (&*RSA, Algorithm::RS512),
        (&*RSA, Algorithm::PS256),
        (&*RSA, Algorithm::PS384),
        (&*EC, Algorithm::ES256),
        (&*EC384, Algorithm::ES384),
        (&*ED, Algorithm::EdDSA),
    ] {
        let token = pair.sign_as(algorithm, Some(pair.id), &good());
        let named = proven(&jwts, &token).await.unwrap();
        assert_eq!(
            (named.name.as_str(), named.groups),
            ("ann", vec!["ops".to_owned()])
        );
        assert!(named.validity.is_current());
    }
    // A token need not name its key if only one key is possible.
    let token = ED.sign_as(Algorithm::EdDSA, None, &good());
    assert!(proven(&jwts, &token).await.is_ok());
    for audience in [json!("other"), json!(["elsewhere", "causeway"])] {
        let token = ED.sign(&claims(&json!({ "aud": audience })));
        assert!(proven(&jwts, &token).await.is_ok());
    }
}

/// The cases are `none`, a public key used as a secret, another key of the same set, and a key for another use.
#[tokio::test]
async fn a_token_cannot_choose_its_own_algorithm() {
    let jwts = all();
    let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
    for alg in ["none", "None", "HS1", ""] {
        let header = part(&json!({ "alg": alg, "typ": "JWT", "kid": "rsa" }));
        let token = format!("{header}.{}.", part(&good()));
        assert!(is_jwt_shaped(&token));
        assert_eq!(
            refusal(&jwts, &token).await,
            "jwt: its algorithm is not accepted"
        );
    }
    let public = Jwk::from_encoding_key(&RSA.key, Algorithm::RS256).unwrap();
    let text = serde_json::to_value(&public).unwrap();
    let modulus = URL_SAFE_NO_PAD.decode(text["n"].as_str().unwrap()).unwrap();
    let forged = Pair {
        algorithm: Algorithm::HS256,
        id: "rsa",
        key: EncodingKey::from_secret(&modulus),
    };
    let token = forged.sign(&good());
    assert_eq!(
        refusal(&jwts, &token).await,
        "jwt: its algorithm is not accepted"
    );
    // A public key is not used as a secret, even with a configuration that allows the algorithm.
    let careless = Issuer {
        validations: vec![(Algorithm::HS256, Validation::new(Algorithm::HS256))],
        ..issuer(ISSUER, JwksCache::fixed(set([&*RSA])))
    };
    let careless = JwtAuthenticator::new(vec![careless]);
    assert_eq!(
        refusal(&careless, &token).await,
        "jwt: its issuer has no key with this id"
    );

    let token = ED.sign_as(Algorithm::EdDSA, Some("ec"), &good());
    assert_eq!(
        refusal(&jwts, &token).await,
        "jwt: its issuer has no key with this id"
    );
    let token = EC.sign_as(Algorithm::ES256, Some("ec384"), &good());
    assert_eq!(
        refusal(&jwts, &token).await,
        "jwt: its issuer has no key with this id"
    );
}

#[tokio::test]
async fn a_rejected_token_gets_its_reason_and_no_detail() {
    let jwts = all();
    let expired = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(now() - 100));
    let begins = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(now() + 100));
    for (more, says) in [
        (
            json!({ "exp": now() - 100 }),
            format!("jwt: expired at {expired}"),
        ),
        (
            json!({ "nbf": now() + 100 }),
            format!("jwt: not valid before {begins}"),
        ),
        (
            json!({ "nbf": u64::MAX }),
            "jwt: not valid by its nbf".into(),
        ),
        (
            json!({ "aud": "elsewhere" }),
            "jwt: not for this audience".into(),
        ),
        (json!({ "aud": [] }), "jwt: not for this audience".into()),
        (
            json!({ "iss": "https://else.test" }),
            "jwt: its issuer is not configured for this listener".into(),
        ),
        (json!({ "iss": null }), "jwt: it has no issuer".into()),
        (json!({ "iss": [ISSUER] }), "jwt: not readable".into()),
        (
            json!({ "aud": null }),
            "jwt: it has no valid claim aud".into(),
        ),
        (
            json!({ "exp": null }),
            "jwt: it has no valid claim exp".into(),
        ),
        (
            json!({ "exp": "soon" }),
            "jwt: it has no valid claim exp".into(),
        ),
        (
            json!({ "sub": null }),
            "jwt: it has no valid user name".into(),
        ),
        (
            json!({ "sub": "uid:0" }),
            "jwt: one of its names or groups is reserved and must not come from a token".into(),
        ),
    ] {
        let token = ED.sign(&claims(&more));
        assert_eq!(refusal(&jwts, &token).await, says, "{more}");
    }
}

#[tokio::test]
async fn a_minute_more_or_less_is_two_clocks_business() {
    let jwts = all();
    for more in [json!({ "exp": now() - 30 }), json!({ "nbf": now() + 30 })] {
        assert!(proven(&jwts, &ED.sign(&claims(&more))).await.is_ok());
    }
}

#[tokio::test]
async fn an_unreadable_or_foreign_token_is_rejected() {
    let jwts = all();
    let signed = ED.sign(&good());
    let (body, _) = signed.rsplit_once('.').unwrap();
    let other = ed("other").sign(&good());
    let (_, signature) = other.rsplit_once('.').unwrap();
    let forged = format!("{body}.{signature}");
    assert_eq!(
        refusal(&jwts, &forged).await,
        "jwt: its signature is not valid"
    );
    let mut header = Header::new(Algorithm::EdDSA);
    header.kid = Some("ed".to_owned());
    header.crit = Some(vec!["b64".to_owned()]);
    let critical = encode(&header, &good(), &ED.key).unwrap();
    assert!(refusal(&jwts, &critical).await.contains("(crit)"));
    for text in [
        "a.b.c",
        "e30.e30.e30",
        "e30.e30.",
        "..",
        "opaque",
        "a.b",
        "a.b.c.d",
        "",
    ] {
        let refused = refusal(&jwts, text).await;
        assert!(refused.starts_with("jwt: "), "{text}: {refused}");
    }
    let large = ED.sign(&claims(&json!({ "more": "x".repeat(MAX_TOKEN_BYTES) })));
    assert_eq!(refusal(&jwts, &large).await, "jwt: larger than 16 KiB");
}

#[tokio::test]
async fn one_issuer_never_speaks_for_another() {
    let (near, far) = (ed("key"), ed("key"));
    let jwts = JwtAuthenticator::new(vec![
        issuer("https://near.test", JwksCache::fixed(set([&near]))),
        issuer("https://far.test", JwksCache::fixed(set([&far]))),
    ]);
    let from = |name: &str| claims(&json!({ "iss": name }));
    let (by_near, by_far) = (from("https://near.test"), from("https://far.test"));
    assert!(proven(&jwts, &near.sign(&by_near)).await.is_ok());
    assert!(proven(&jwts, &far.sign(&by_far)).await.is_ok());
    let refused = refusal(&jwts, &near.sign(&by_far)).await;
    assert_eq!(refused, "jwt: its signature is not valid");
    assert!(proven(&jwts, &far.sign(&by_near)).await.is_err());
}

/// Answers each requested fetch with the next of these sets.
async fn serve(writer: &JwksWriter, sets: Vec<Option<KeySet>>) {
    for set in sets {
        writer.fetch_requested().await;
        writer.fetch_started();
        writer.fetch_finished(set);
    }
    std::future::pending::<()>().await;
}

#[tokio::test(start_paused = true)]
async fn a_missing_key_is_fetched_and_then_the_token_is_accepted() {
    let (keys, writer) = JwksCache::refreshable(Duration::from_hours(1));
    let jwts = JwtAuthenticator::new(vec![issuer(ISSUER, keys)]);
    let (old, new) = (ed("old"), ed("new"));
    let (by_old, by_new) = (old.sign(&good()), new.sign(&good()));
    let work = async {
        let refused = refusal(&jwts, &by_old).await;
        assert_eq!(
            refused,
            "dependency_unavailable: jwt: the keys of its issuer have not been loaded yet; try again later"
        );
        tokio::time::advance(crate::state::jwks::MIN_FETCH_INTERVAL).await;
        let first = proven(&jwts, &by_old).await.unwrap();
        assert!(first.validity.is_current());
        // The keys were fetched a moment ago, so they are not fetched again.
        assert_eq!(
            refusal(&jwts, &by_new).await,
            "jwt: its issuer has no key with this id"
        );
        tokio::time::advance(crate::state::jwks::MIN_FETCH_INTERVAL).await;
        assert!(proven(&jwts, &by_new).await.is_ok());
        assert!(
            !first.validity.is_current(),
            "the key that proved it is gone"
        );
        assert!(proven(&jwts, &by_old).await.is_err());
        tokio::time::advance(Duration::from_secs(3700)).await;
        let refused = refusal(&jwts, &by_new).await;
        assert!(refused.contains("1h 1m 43s old"), "{refused}");
        assert!(refused.starts_with("dependency_unavailable: "), "{refused}");
    };
    let sets = [None, Some(set([&old])), Some(set([&new]))].into();
    tokio::select! {
        () = serve(&writer, sets) => {}
        () = work => {}
    }
}

#[tokio::test]
async fn a_token_expires_at_its_stated_time() {
    let jwts = all();
    let mut life = 1;
    let (token, validity, end) = loop {
        let end = now() + life;
        let token = ED.sign(&claims(&json!({ "exp": end - CLOCK_SKEW_SECONDS })));
        match proven(&jwts, &token).await {
            Ok(identity) => break (token, identity.validity, end),
            // A slow machine has checked it too late.
            Err(why) => assert!(now() >= end, "{why:?}"),
        }
        life *= 2;
    };
    while now() <= end {
        tokio::task::yield_now().await;
    }
    assert!(!validity.is_current());
    let refused = refusal(&jwts, &token).await;
    assert!(refused.starts_with("jwt: expired at "), "{refused}");
    assert_eq!(
        expired_detail(validity.valid_until),
        refused,
        "the message is the same without keys"
    );
    let proven_again = jwts
        .identify(
            (&token, Expired::AcceptFor(&ClientIdentity::for_test("ann"))),
            BOUND,
        )
        .await;
    assert!(
        proven_again.is_ok(),
        "for a stream that its expiry does not end"
    );
    let forged = ed("ed").sign(&good());
    let proven_again = jwts
        .identify(
            (
                &forged,
                Expired::AcceptFor(&ClientIdentity::for_test("ann")),
            ),
            BOUND,
        )
        .await;
    assert!(proven_again.is_err());
}

#[test]
fn a_jwt_is_known_by_its_shape() {
    let token = ED.sign(&good());
    for (text, is) in [
        (token.as_str(), true),
        ("a.b.c", true),
        ("a.b.", true),
        ("cwc1.secret", false),
        ("opaque", false),
        (".b.c", false),
        ("a.b.c.d", false),
        ("a.b!.c", false),
        ("a.b.c=", false),
    ] {
        assert_eq!(is_jwt_shaped(text), is, "{text}");
    }
}
