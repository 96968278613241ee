//! Environment variables of this program, and warnings of those that have no effect.

use clap::CommandFactory;

use crate::cli::Cli;
use crate::output::errln;
use crate::suggestion::nearest;

/// Prefix of this program's variables.
const PREFIX: &str = "CAUSEWAY_";

/// Returns the variables of this process whose names and values are UTF-8.
pub(crate) fn environment() -> Vec<(String, String)> {
    std::env::vars_os()
        .filter_map(|(name, text)| Some((name.into_string().ok()?, text.into_string().ok()?)))
        .collect()
}

/// Returns the variables that set flags of commands and are no configuration keys.
pub(crate) fn of_commands() -> Vec<String> {
    fn collect(command: &clap::Command, found: &mut Vec<String>) {
        let variables = command.get_arguments().filter_map(clap::Arg::get_env);
        found.extend(variables.map(|name| name.to_string_lossy().into_owned()));
        for command in command.get_subcommands() {
            collect(command, found);
        }
    }
    let mut found = Vec::new();
    collect(&Cli::command(), &mut found);
    found
}

/// Warns of variables that no command reads.
pub(crate) fn warn_of_unknown() {
    let environment = environment();
    if !environment.iter().any(|(name, _)| name.starts_with(PREFIX)) {
        return;
    }
    let known = of_commands();
    #[cfg(target_os = "linux")]
    let known = [known, crate::cli::operator::config_variables()].concat();
    for warning in unknown_warnings(&environment, &known, &[]) {
        errln!("warning: {warning}");
    }
}

/// Returns a warning for each variable `CAUSEWAY_…` that is not among the known ones. `texts` are the other inputs of the
/// process. Variables that an address in them names are known.
pub(crate) fn unknown_warnings(
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

#[cfg(test)]
mod tests {
    use super::*;

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
        let found = unknown_warnings(
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
