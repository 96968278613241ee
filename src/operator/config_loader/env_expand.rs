//! Environment variables in the address of a listener: `$(POD_IP):10255`.
//!
//! A pod knows its own address only as a variable, and the address cannot be written down before the pod has one. Variables
//! are expanded only here, in the syntax of Kubernetes. The expanded address is validated like any other.

use std::net::Ipv6Addr;

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
}
