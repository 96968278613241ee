//! Names and groups from a token's claims.
//!
//! All names that a listener accepts are in one name space, independent of their source. A name that only one source can assign
//! is therefore never taken from a token, with or without a prefix. Only the kernel assigns `uid:…`, `system:anonymous` means
//! anonymous clients, and SPIFFE ids of the own trust domain come from the own CA. The rest of `system:` belongs to Kubernetes
//! and is accepted if a prefix is configured, even an empty one. A token with a reserved group is refused, because a group that
//! is left out could no longer be denied anything.

use super::Rejection;
use crate::{
    proxy::authn::identity::UID_PREFIX,
    state::policy::{ANONYMOUS, AUTHENTICATED, UNAUTHENTICATED},
};
use causeway_certs::TrustDomain;
use serde_json::{Map, Value};

/// Prefix of the names that Kubernetes assigns itself.
const SYSTEM_PREFIX: &str = "system:";
/// Maximum length of a name or group, in bytes.
const MAX_NAME_BYTES: usize = 256;

/// Mapping of a token's claims to a name and groups.
#[derive(Clone, Debug)]
pub struct ClaimMappings {
    /// Claim with the name.
    pub username_claim: String,
    /// Prefix of the name.
    pub username_prefix: Option<String>,
    /// Claim with the groups.
    pub groups_claim: String,
    /// Prefix of each group.
    pub groups_prefix: Option<String>,
    /// The own trust domain.
    pub trust_domain: TrustDomain,
}

impl ClaimMappings {
    /// Returns the name and the groups.
    ///
    /// # Errors
    /// If the token has no valid name, or has a name that a token cannot assign.
    pub(super) fn map_claims(
        &self,
        claims: &Map<String, Value>,
    ) -> Result<(String, Vec<String>), Rejection> {
        // As in Kubernetes: the holder can choose an address that the issuer has not verified.
        let email_verified = claims.get("email_verified");
        if self.username_claim == "email"
            && email_verified.is_some_and(|verified| *verified != true)
        {
            return Err("jwt: its email address is not verified".into());
        }
        let name = claims.get(&self.username_claim).and_then(Value::as_str);
        let name = name.filter(|name| !name.is_empty());
        let name = name.ok_or("jwt: it has no valid user name")?;
        let name = self.check_name(name, self.username_prefix.as_deref())?;
        let groups = match claims.get(&self.groups_claim) {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::String(one)) => vec![one.as_str()],
            Some(Value::Array(list)) => {
                let list: Option<Vec<_>> = list.iter().map(Value::as_str).collect();
                list.ok_or("jwt: its groups are not readable")?
            }
            Some(_) => return Err("jwt: its groups are not readable".into()),
        };
        let prefix = self.groups_prefix.as_deref();
        let groups = groups
            .into_iter()
            .map(|group| self.check_name(group, prefix));
        Ok((name, groups.collect::<Result<_, _>>()?))
    }

    fn check_name(&self, claim: &str, prefix: Option<&str>) -> Result<String, Rejection> {
        let name = format!("{}{claim}", prefix.unwrap_or_default());
        if !is_valid_name(&name) {
            return Err(
                "jwt: one of its names or groups is empty, too long or has control characters"
                    .into(),
            );
        }
        let is_reserved = is_reserved_name(&name, &self.trust_domain);
        let is_unprefixed_system = prefix.is_none() && name.starts_with(SYSTEM_PREFIX);
        if is_reserved || is_unprefixed_system {
            return Err(
                "jwt: one of its names or groups is reserved and must not come from a token".into(),
            );
        }
        Ok(name)
    }
}

/// Whether a name or group is valid.
pub(in crate::proxy::authn) fn is_valid_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= MAX_NAME_BYTES && !name.chars().any(char::is_control)
}

/// Whether only the kernel, or this gateway with this trust domain, assigns this name.
pub(in crate::proxy::authn) fn is_reserved_name(name: &str, trust_domain: &TrustDomain) -> bool {
    name.starts_with(UID_PREFIX)
        || [ANONYMOUS, AUTHENTICATED, UNAUTHENTICATED].contains(&name)
        || is_own_uri(name, trust_domain)
}

fn is_own_uri(name: &str, trust_domain: &TrustDomain) -> bool {
    let Some((scheme, rest)) = name.split_once("://") else {
        return false;
    };
    let domain = rest.split('/').next().unwrap_or_default();
    scheme.eq_ignore_ascii_case("spiffe") && domain.eq_ignore_ascii_case(trust_domain.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn naming(username_prefix: Option<&str>, groups_prefix: Option<&str>) -> ClaimMappings {
        ClaimMappings {
            username_claim: "sub".into(),
            username_prefix: username_prefix.map(str::to_owned),
            groups_claim: "groups".into(),
            groups_prefix: groups_prefix.map(str::to_owned),
            trust_domain: TrustDomain::parse("world.test").unwrap(),
        }
    }

    fn read(naming: &ClaimMappings, claims: &Value) -> Result<(String, Vec<String>), Rejection> {
        naming.map_claims(claims.as_object().unwrap())
    }

    fn named(name: &str, groups: &[&str]) -> (String, Vec<String>) {
        let groups = groups.iter().map(|group| (*group).to_owned());
        (name.to_owned(), groups.collect())
    }

    #[test]
    fn names_and_groups_are_taken_with_their_prefixes() {
        let claims = json!({ "sub": "ann", "groups": ["ops", "dev"] });
        let bare = naming(None, None);
        assert_eq!(read(&bare, &claims), Ok(named("ann", &["ops", "dev"])));
        let both = naming(Some("id:"), Some("g:"));
        assert_eq!(
            read(&both, &claims),
            Ok(named("id:ann", &["g:ops", "g:dev"]))
        );
        let one = json!({ "sub": "ann", "groups": "ops" });
        assert_eq!(read(&bare, &one), Ok(named("ann", &["ops"])));
        for none in [
            json!({ "sub": "ann" }),
            json!({ "sub": "ann", "groups": null }),
        ] {
            assert_eq!(read(&bare, &none), Ok(named("ann", &[])));
        }
    }

    #[test]
    fn reserved_groups_are_never_taken_from_a_token() {
        let bare = naming(None, None);
        let open = naming(Some(""), Some(""));
        let begun = naming(Some("system:"), Some("uid"));
        for (naming, name, group, good) in [
            (&bare, "system:masters", "", false),
            (&bare, "ann", "system:masters", false),
            (
                &open,
                "system:serviceaccount:ns:prom",
                "system:masters",
                true,
            ),
            (&begun, "serviceaccount:ns:prom", "team", true),
            (&begun, "anonymous", "team", false),
            (&begun, "ann", ":0", false),
            (&open, "uid:0", "team", false),
            (&open, "ann", "uid:0", false),
            (&open, "system:anonymous", "team", false),
            (&open, "ann", "system:authenticated", false),
            (&open, "ann", "system:unauthenticated", false),
            (&open, "spiffe://world.test/client/alice", "team", false),
            (&open, "SPIFFE://World.test/x", "team", false),
            (&bare, "spiffe://elsewhere.test/ns/prom", "team", true),
        ] {
            let claims = json!({ "sub": name, "groups": if group.is_empty() { json!([]) } else { json!([group]) } });
            assert_eq!(read(naming, &claims).is_ok(), good, "{claims}");
        }
    }

    #[test]
    fn an_unreadable_user_name_is_rejected() {
        let bare = naming(None, None);
        let long = "x".repeat(MAX_NAME_BYTES + 1);
        for claims in [
            json!({}),
            json!({ "sub": 7 }),
            json!({ "sub": "" }),
            json!({ "sub": "a\nb" }),
            json!({ "sub": long }),
            json!({ "sub": "ann", "groups": 7 }),
            json!({ "sub": "ann", "groups": ["ops", 7] }),
            json!({ "sub": "ann", "groups": [""] }),
        ] {
            assert!(read(&bare, &claims).is_err(), "{claims}");
        }
        let mail = ClaimMappings {
            username_claim: "email".into(),
            ..bare
        };
        let claims = |verified: bool| json!({ "email": "a@b", "email_verified": verified });
        assert!(read(&mail, &claims(true)).is_ok());
        assert!(read(&mail, &claims(false)).is_err());
        assert!(read(&mail, &json!({ "email": "a@b" })).is_ok());
    }
}
