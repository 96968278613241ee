//! Variables of the environment in the address of a listener: `$(POD_IP):10255`.
//!
//! A pod knows its own address as a variable alone, and before it has one nobody can write it down. They are filled in
//! here and nowhere else, written as Kubernetes writes them; what they say is judged as if it stood in their place.

use std::net::Ipv6Addr;

/// The environment, by name.
#[derive(Debug, Default)]
pub(super) struct Variables(Vec<(String, String)>);

impl Variables {
    pub(super) fn new(environment: &[(String, String)]) -> Self {
        Self(environment.to_vec())
    }

    /// The text with what these say in the place of their names; an address of IPv6 gets the brackets that it needs.
    pub(super) fn fill(&self, text: &str) -> Result<String, String> {
        let (mut filled, mut rest) = (String::new(), text);
        while let Some((before, named)) = rest.split_once("$(") {
            let Some((name, after)) = named.split_once(')') else {
                break;
            };
            filled.push_str(before);
            let value = self.of(name)?;
            let bare = value.parse::<Ipv6Addr>().is_ok() && !before.ends_with('[');
            let (open, close) = if bare { ("[", "]") } else { ("", "") };
            filled.extend([open, value, close]);
            rest = after;
        }
        Ok(filled + rest)
    }

    fn of(&self, name: &str) -> Result<&str, String> {
        let found = self.0.iter().find(|(variable, _)| variable == name);
        let value = found.map(|(_, value)| value.trim());
        // An empty variable is how many tools unset one.
        value.filter(|value| !value.is_empty()).ok_or_else(|| {
            format!(
                "the environment has no {name}; set it (in a pod by valueFrom, such as status.podIP), or write the address here"
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
        let variables = Variables::new(&[
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
            assert_eq!(variables.fill(text).unwrap(), filled);
        }
        for absent in ["NOBODYS", "EMPTY", ""] {
            let why = variables.fill(&format!("$({absent}):1")).unwrap_err();
            assert!(
                why.starts_with(&format!("the environment has no {absent};")),
                "{why}"
            );
        }
    }
}
