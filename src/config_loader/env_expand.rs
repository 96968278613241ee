//! Environment variables in the address of a listener: `$(POD_IP):10255`.
//!
//! A pod knows its own address only as a variable, and the address cannot be written down before the pod has one. Variables
//! are expanded only here, in the syntax of Kubernetes. The expanded address is validated like any other.

use std::net::Ipv6Addr;

use super::suggestion::nearest;

/// Environment variables by name.
#[derive(Debug, Default)]
pub(super) struct Environment(Vec<(String, String)>);

impl Environment {
    pub(super) fn new(environment: &[(String, String)]) -> Self {
        Self(environment.to_vec())
    }

    /// Replaces the names of variables in the text with their values. An IPv6 address gets the brackets that it needs.
    pub(super) fn expand(&self, text: &str) -> Result<String, String> {
        let (mut expanded, mut remaining) = (String::new(), text);
        while let Some((before, tail)) = remaining.split_once("$(") {
            let Some((name, after)) = tail.split_once(')') else {
                break;
            };
            expanded.push_str(before);
            let value = self.value_of(name)?;
            let is_bare_ipv6 = value.parse::<Ipv6Addr>().is_ok() && !before.ends_with('[');
            let (open, close) = if is_bare_ipv6 { ("[", "]") } else { ("", "") };
            expanded.extend([open, value, close]);
            remaining = after;
        }
        Ok(expanded + remaining)
    }

    fn value_of(&self, name: &str) -> Result<&str, String> {
        let found = self.0.iter().find(|(variable, _)| variable == name);
        let value = found.map(|(_, value)| value.trim());
        // Many tools unset a variable by making it empty.
        value.filter(|value| !value.is_empty()).ok_or_else(|| {
            format!(
                "the environment variable {name} is not set; set it (in a pod with valueFrom, such as status.podIP), or write the address here"
            )
        })
    }
}

/// Returns a warning for each variable `CAUSEWAY_…` that is not among the known ones. `texts` are the other inputs of the
/// process. Variables that an address in them names are known.
pub(crate) fn unknown_variable_warnings(
    environment: &[(String, String)],
    known: &[String],
    texts: &[&str],
) -> Vec<String> {
    let names = environment.iter().map(|(name, _)| name.as_str());
    let names: Vec<_> = names.filter(|name| name.starts_with(PREFIX)).collect();
    // For a Service named causeway-… the kubelet sets such variables in all pods of the namespace.
    let service_prefixes: Vec<_> = names
        .iter()
        .filter_map(|name| name.strip_suffix("_SERVICE_HOST"))
        .collect();
    let is_service_variable = |name: &str| {
        let suffixes = service_prefixes
            .iter()
            .filter_map(|service| name.strip_prefix(service));
        suffixes
            .into_iter()
            .any(|rest| rest.starts_with("_SERVICE_") || rest.starts_with("_PORT"))
    };
    let is_referenced = |name: &str| {
        let reference = format!("$({name})");
        let values = environment.iter().map(|(_, value)| value.as_str());
        values
            .chain(texts.iter().copied())
            .any(|text| text.contains(&reference))
    };
    let is_known = |name: &str| known.iter().any(|known| known == name);
    let unknown_names = names
        .iter()
        .filter(|name| !is_known(name) && !is_service_variable(name) && !is_referenced(name));
    let lowercase_names: Vec<String> = known.iter().map(|known| known.to_lowercase()).collect();
    let to_warning = |name: &&str| {
        let suggestion = nearest(name, lowercase_names.iter().map(String::as_str));
        let suggestion = suggestion.map(|near| format!("; did you mean {}?", near.to_uppercase()));
        let suggestion = suggestion.unwrap_or_default();
        format!("the variable {name} is unknown and has no effect{suggestion}")
    };
    unknown_names.map(to_warning).collect()
}

/// Prefix of this program's variables.
const PREFIX: &str = "CAUSEWAY_";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_stands_for_an_address_of_either_family() {
        let own = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let variables = Environment::new(&[
            own("POD_IP", "10.244.1.7"),
            own("SIX", "fd00::7"),
            own("EMPTY", ""),
        ]);
        for (text, filled) in [
            ("$(POD_IP):10255", "10.244.1.7:10255"),
            ("$(SIX):10255", "[fd00::7]:10255"),
            ("[$(SIX)]:10255", "[fd00::7]:10255"),
            ("127.0.0.1:1", "127.0.0.1:1"),
            ("$(POD_IP:1", "$(POD_IP:1"),
        ] {
            assert_eq!(variables.expand(text).unwrap(), filled);
        }
        for absent in ["NOBODYS", "EMPTY", ""] {
            let why = variables.expand(&format!("$({absent}):1")).unwrap_err();
            assert!(
                why.starts_with(&format!("the environment variable {absent} is not set;")),
                "{why}"
            );
        }
    }

    #[test]
    fn unused_variables_are_named() {
        let environment = [
            ("CAUSEWAY_LOG_FITLER", "debug"),
            ("CAUSEWAY_LOG_FORMAT", "json"),
            ("CAUSEWAY_POD_IP", "10.0.0.1"),
            ("CAUSEWAY_LISTEN", "$(CAUSEWAY_OTHER_IP):1"),
            ("CAUSEWAY_OTHER_IP", "10.0.0.2"),
            ("CAUSEWAY_GW_SERVICE_HOST", "10.0.0.3"),
            ("CAUSEWAY_GW_SERVICE_PORT_TUNNEL", "10262"),
            ("CAUSEWAY_GW_PORT_10262_TCP_ADDR", "10.0.0.3"),
            ("HOME", "/root"),
        ];
        let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let known = [
            "CAUSEWAY_LOG_FILTER",
            "CAUSEWAY_LOG_FORMAT",
            "CAUSEWAY_LISTEN",
        ];
        let found = unknown_variable_warnings(
            &environment,
            &known.map(String::from),
            &["at: $(CAUSEWAY_POD_IP):1"],
        );
        assert_eq!(
            found,
            [
                "the variable CAUSEWAY_LOG_FITLER is unknown and has no effect; did you mean CAUSEWAY_LOG_FILTER?"
            ]
        );
    }
}
