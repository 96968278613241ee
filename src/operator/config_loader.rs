//! Loads the typed configuration of gateway or edge from a YAML file, the environment and flags.
//!
//! 1. `yaml` parses the file and records the position of each value.
//! 2. Variables and flags override it: flags over environment over file.
//! 3. `schema_check` checks the result against the schema and removes invalid values. `env_expand` expands variables in
//!    addresses of listeners.
//! 4. serde reads the rest, repeatedly, each time without the value at which it stopped.
//! 5. `validate` checks the result. All faults of all steps are reported together. Each names the file, line and column, the
//!    flag or the variable from which the value came.

mod env_expand;
mod path;
mod schema;
mod schema_check;
mod yaml;

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;

use causeway_config::{ConfigError, ConfigErrors, Log, LogFormat, Validate};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::telemetry;
use env_expand::Environment;
use path::{PathSegment, ValuePath, parent};
use schema_check::SchemaChecker;
use yaml::{KeyValuePositions, Position};

pub(crate) use schema::{ConfigKey, ValueForm, json_schema, keys, plain_text};

/// Configuration file, checked against its schema and validated.
pub(crate) trait ConfigDocument: DeserializeOwned + JsonSchema + Validate {}

impl<C: DeserializeOwned + JsonSchema + Validate> ConfigDocument for C {}

/// A configuration that can be read from files, variables and flags.
pub(crate) trait ProcessConfig: ConfigDocument + AsRef<Log> {}

impl<C: ConfigDocument + AsRef<Log>> ProcessConfig for C {}

/// Sources of a configuration.
#[derive(Debug, Default)]
pub(crate) struct ConfigSources {
    /// The YAML file; defaults apply without one.
    pub(crate) file: Option<PathBuf>,
    /// Environment variables.
    pub(crate) environment: Vec<(String, String)>,
    /// Keys by name, each with the texts of its flag.
    pub(crate) flags: Vec<(String, Vec<String>)>,
    /// Keys by name that are set by a common variable, such as `HTTPS_PROXY`, if nothing else sets them.
    pub(crate) fallbacks: &'static [(&'static str, &'static str)],
}

/// Unusable configuration, with all its faults: one per line.
#[derive(Debug, thiserror::Error)]
pub(crate) struct RejectedConfig {
    pub(crate) faults: Vec<String>,
    /// Log format that the configuration requests, as far as it can be read.
    pub(crate) format: LogFormat,
}

impl From<Vec<String>> for RejectedConfig {
    fn from(faults: Vec<String>) -> Self {
        Self {
            faults,
            format: LogFormat::Text,
        }
    }
}

impl fmt::Display for RejectedConfig {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.faults.join("\n"))
    }
}

/// Reads and validates the configuration.
pub(crate) fn load<C: ProcessConfig>(sources: &ConfigSources) -> Result<C, RejectedConfig> {
    load_with(sources, validate_config)
}

/// Loads like [`load`], and also checks all files that the configuration names.
pub(crate) fn load_with_files<C: ProcessConfig>(
    sources: &ConfigSources,
) -> Result<C, RejectedConfig> {
    load_with(sources, |config: &C| {
        let mut faults = validate_config(config);
        faults.extend(config.validate_files());
        faults
    })
}

fn load_with<C: ProcessConfig>(
    sources: &ConfigSources,
    validate: impl FnOnce(&C) -> Vec<ConfigError>,
) -> Result<C, RejectedConfig> {
    let mut partial = PartialConfig::default();
    partial.read_file(sources.file.as_deref());
    partial.apply_overrides::<C>(sources);
    let is_json = partial.value["log"]["format"] == "json";
    match partial.into_config(validate) {
        Ok((config, _)) => Ok(config),
        Err(rejected) if is_json => Err(RejectedConfig {
            format: LogFormat::Json,
            ..rejected
        }),
        Err(rejected) => Err(rejected),
    }
}

/// Loads like [`load`], for a process that runs. An empty file counts as a fault, because its writer has probably not
/// finished.
pub(crate) fn reload<C: ProcessConfig>(sources: &ConfigSources) -> Result<C, RejectedConfig> {
    if let Some(file) = &sources.file
        && std::fs::read_to_string(file).is_ok_and(|text| text.trim().is_empty())
    {
        let file = file.display();
        let why = format!("{file}:1:1: the file is empty; write {{}} to use all defaults");
        return Err(vec![why].into());
    }
    load(sources)
}

/// Parses YAML or JSON of an unknown type. An error states its line and column.
pub(crate) fn parse_untyped(text: &str) -> Result<serde_json::Value, String> {
    let document = yaml::parse(text);
    match document.faults.into_iter().next() {
        Some((position, _, fault)) => {
            Err(format!("{}:{}: {fault}", position.line, position.column))
        }
        None => Ok(document.value),
    }
}

/// Reads and validates a single file. Also returns the positions of its values.
pub(crate) fn load_document<C: ConfigDocument>(
    file: &std::path::Path,
) -> Result<(C, SourceMap), RejectedConfig> {
    let mut partial = PartialConfig::default();
    partial.read_file(Some(file));
    let (document, positions) = partial.into_config(C::validate)?;
    Ok((document, SourceMap(positions)))
}

/// Positions of the values in a file.
#[derive(Debug)]
pub(crate) struct SourceMap(HashMap<String, KeyValuePositions>);

impl SourceMap {
    /// Returns the line of the value at this path, from 1, or 0 if there is no such value.
    pub(crate) fn line_of(&self, path: &str) -> usize {
        self.0.get(path).map_or(0, |positions| positions.value.line)
    }
}

/// Flag or variable that set a value.
type Origin = String;

/// Configuration that is being assembled.
#[derive(Debug, Default)]
struct PartialConfig {
    file: String,
    value: Value,
    positions: HashMap<String, KeyValuePositions>,
    origins: HashMap<String, Origin>,
    environment: Environment,
    faults: Vec<LocatedError>,
}

/// Fault with its position. Faults are ordered by position: the file from top to bottom, then the rest.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct LocatedError {
    is_outside_file: bool,
    position: Option<Position>,
    text: String,
}

impl PartialConfig {
    fn read_file(&mut self, file: Option<&std::path::Path>) {
        self.value = Value::Object(Map::new());
        let Some(file) = file else {
            self.file = "configuration".into();
            return;
        };
        self.file = file.display().to_string();
        let text = match std::fs::read_to_string(file) {
            Ok(text) => text,
            Err(error) => {
                return self.report_in_file(None, "", &format!("cannot be read: {error}"));
            }
        };
        let document = yaml::parse(&text);
        self.positions = document.positions;
        for (position, path, message) in &document.faults {
            self.report_in_file(Some(*position), path, message);
        }
        match document.value {
            Value::Object(_) => self.value = document.value,
            // The text has a syntax error, so the rest cannot be checked.
            Value::Null => {}
            _ => self.report_in_file(None, "", "must be a map: lines of \"key: value\""),
        }
    }

    fn apply_overrides<C: ProcessConfig>(&mut self, sources: &ConfigSources) {
        self.environment = Environment::new(&sources.environment);
        let keys: Vec<ConfigKey> = keys::<C>().into_iter().filter(|key| key.settable).collect();
        let env_value = |name: &str| {
            let found = sources
                .environment
                .iter()
                .find(|(variable, _)| variable == name);
            // Many tools unset a variable by making it empty.
            found.map(|(_, text)| text).filter(|text| !text.is_empty())
        };
        for key in &keys {
            let flag = sources.flags.iter().find(|(name, _)| *name == key.name);
            if let Some((_, texts)) = flag {
                self.apply_override(key, texts, format!("flag --{}", key.flag()));
            } else if let Some(text) = env_value(&key.variable()) {
                self.apply_override(
                    key,
                    std::slice::from_ref(text),
                    format!("environment {}", key.variable()),
                );
            }
        }
        for (name, fallback) in sources.fallbacks {
            let key = keys.iter().find(|key| key.name == *name);
            let is_absent = self.value.get(*name).is_none_or(Value::is_null);
            if let (Some(key), true, Some(text)) = (key, is_absent, env_value(fallback)) {
                self.apply_override(
                    key,
                    std::slice::from_ref(text),
                    format!("environment {fallback}"),
                );
            }
        }
    }

    /// Overrides the file's value of a key with these texts.
    fn apply_override(&mut self, key: &ConfigKey, texts: &[String], origin: Origin) {
        let start = ValuePath::default();
        let path = key.name.split('.').fold(start, |path, step| path.key(step));
        let last = texts.last().map_or("", String::as_str);
        let value = match key.form {
            ValueForm::Text => Value::from(last),
            ValueForm::Scalar => yaml::parse_scalar(last),
            ValueForm::List if !last.starts_with('[') => texts
                .iter()
                .flat_map(|text| text.split(','))
                .map(|text| Value::from(text.trim()))
                .collect(),
            ValueForm::List | ValueForm::Yaml => {
                let document = yaml::parse(last);
                for (position, _, message) in document.faults {
                    let column = position.column;
                    self.report_in_origin(
                        &origin,
                        &key.name,
                        &format!("column {column}: {message}"),
                    );
                }
                document.value
            }
        };
        path.set(&mut self.value, value);
        let name = path.to_string();
        self.positions.retain(|spot, _| !is_within(spot, &name));
        self.origins.insert(name, origin);
    }

    fn into_config<C: ConfigDocument>(
        mut self,
        validate: impl FnOnce(&C) -> Vec<ConfigError>,
    ) -> Result<(C, HashMap<String, KeyValuePositions>), RejectedConfig> {
        let schema = schema::schema_of::<C>();
        let mut value = std::mem::take(&mut self.value);
        let mut checker = SchemaChecker::with_environment(std::mem::take(&mut self.environment));
        checker.check(&mut value, &schema, &ValuePath::default());
        let config = self.deserialize::<C>(&mut value, &mut checker);
        for finding in std::mem::take(&mut checker.errors) {
            self.report(&finding.path.to_string(), finding.at_key, &finding.message);
        }
        let original_path = |path: &str| {
            checker
                .pruned
                .original_path(&ValuePath::parse(path))
                .to_string()
        };
        let pruned_elements = checker.pruned.affected_elements();
        let is_complete = |path: &str| {
            let overlaps = |around: &String| is_within(path, around) || is_within(around, path);
            !pruned_elements.iter().any(overlaps)
        };
        for fault in config.as_ref().map(validate).unwrap_or_default() {
            let (path, rests_on) = (
                original_path(&fault.path),
                fault.depends_on.as_deref().map(original_path),
            );
            if is_complete(&path) && rests_on.as_deref().is_none_or(is_complete) {
                self.report(&path, false, &fault.message);
            }
        }
        match config {
            Some(config) if self.faults.is_empty() => Ok((config, self.positions)),
            _ => {
                self.faults.sort();
                self.faults.dedup();
                let faults = self.faults.into_iter().map(|fault| fault.text);
                Err(faults.collect::<Vec<_>>().into())
            }
        }
    }

    /// Deserializes the value. At each error of serde, records a fault and removes the value at which serde stopped.
    fn deserialize<C: ConfigDocument>(
        &mut self,
        value: &mut Value,
        checker: &mut SchemaChecker,
    ) -> Option<C> {
        loop {
            let error = match serde_path_to_error::deserialize::<_, C>(&*value) {
                Ok(config) => return Some(config),
                Err(error) => error,
            };
            let path = to_value_path(error.path());
            let original_path = checker.pruned.original_path(&path);
            // Errors below removed values have already been reported.
            if !checker.pruned.has_removed_within(&original_path) {
                self.report(
                    &original_path.to_string(),
                    false,
                    &error.inner().to_string(),
                );
            }
            if !path.remove(value) {
                return None;
            }
            checker.pruned.add(original_path);
        }
    }

    fn report(&mut self, path: &str, at_key: bool, message: &str) {
        let mut current = Some(path);
        while let Some(location) = current {
            if let Some(origin) = self.origins.get(location).cloned() {
                return self.report_in_origin(&origin, path, message);
            }
            if let Some(positions) = self.positions.get(location).copied() {
                let position = if at_key && location == path {
                    positions.key
                } else {
                    positions.value
                };
                return self.report_in_file(Some(position), path, message);
            }
            current = parent(location);
        }
        self.report_in_file(None, path, message);
    }

    fn report_in_file(&mut self, position: Option<Position>, path: &str, message: &str) {
        let mut location = self.file.clone();
        if let Some(Position { line, column }) = position {
            location = format!("{location}:{line}:{column}");
        }
        self.push_error(false, position, &location, (path, message));
    }

    fn report_in_origin(&mut self, origin: &str, path: &str, message: &str) {
        self.push_error(true, None, origin, (path, message));
    }

    fn push_error(
        &mut self,
        is_outside_file: bool,
        position: Option<Position>,
        location: &str,
        (path, message): (&str, &str),
    ) {
        let prefix = if path.is_empty() {
            String::new()
        } else {
            format!("{path}: ")
        };
        let text = format!("{location}: {prefix}{message}");
        self.faults.push(LocatedError {
            is_outside_file,
            position,
            text,
        });
    }
}

/// Returns the faults in the configuration and in the log settings.
fn validate_config<C: ProcessConfig>(config: &C) -> Vec<ConfigError> {
    let mut faults = ConfigErrors::default();
    let log: &Log = config.as_ref();
    if let Err(error) = telemetry::parse_filter(&log.filter) {
        faults.add("log.filter", error.to_string());
    }
    let mut all = config.validate();
    all.extend(faults.into_vec());
    all
}

/// Whether `path` is `ancestor` or inside it.
fn is_within(path: &str, ancestor: &str) -> bool {
    path.strip_prefix(ancestor)
        .is_some_and(|suffix| suffix.is_empty() || suffix.starts_with(['.', '[']))
}

fn to_value_path(path: &serde_path_to_error::Path) -> ValuePath {
    use serde_path_to_error::Segment;
    path.iter()
        .fold(ValuePath::default(), |path, segment| match segment {
            Segment::Seq { index } => path.child(PathSegment::Index(*index)),
            Segment::Map { key } => path.key(key),
            Segment::Enum { variant } => path.key(variant),
            Segment::Unknown => path,
        })
}

#[cfg(test)]
mod tests;
