//! One flag for each key of a configuration, made from its schema.
//!
//! Values stay texts here. `config_loader` parses them together with the file and the environment, so that it reports all
//! faults at once.

use crate::operator::config_loader::{ConfigKey, ValueForm, keys, plain_text};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches};
use schemars::JsonSchema;
use std::{marker::PhantomData, path::PathBuf};

/// Keys of `C` that were given as flags: the name of each with its texts.
#[derive(Debug)]
pub(crate) struct ConfigFlags<C> {
    pub(crate) values: Vec<(String, Vec<String>)>,
    config_type: PhantomData<fn() -> C>,
}

fn flag_keys<C: JsonSchema>() -> impl Iterator<Item = ConfigKey> {
    keys::<C>().into_iter().filter(|key| key.settable)
}

fn flag_arg(key: &ConfigKey) -> Arg {
    let meaning = key.help.trim_end_matches('.');
    let is_empty = |text: &String| matches!(text.as_str(), "" | "…" | "[]" | "{}");
    let default = key.default.as_ref().map(plain_text);
    let help = match default.filter(|text| !is_empty(text)) {
        Some(default) => format!("{meaning} [default: {default}]"),
        None => meaning.to_owned(),
    };
    let flag = key.flag();
    let arg = Arg::new(key.name.clone())
        .value_name(key.placeholder())
        .help(help)
        .help_heading("Configuration keys")
        .hide_env(true);
    let address = flag.strip_suffix("es").filter(|word| word.ends_with("ss"));
    match (key.form, address.or_else(|| flag.strip_suffix('s'))) {
        (ValueForm::List, Some(singular)) => arg
            .visible_alias(singular.to_owned())
            .action(ArgAction::Append),
        (ValueForm::List, None) => arg.action(ArgAction::Append),
        _ => arg,
    }
    .long(flag)
}

impl<C: JsonSchema> Args for ConfigFlags<C> {
    fn augment_args(command: Command) -> Command {
        command.args(flag_keys::<C>().map(|key| flag_arg(&key)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<C: JsonSchema> FromArgMatches for ConfigFlags<C> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let values_of = |key: &ConfigKey| {
            let texts = matches.get_many::<String>(&key.name)?;
            Some((key.name.clone(), texts.cloned().collect()))
        };
        Ok(Self {
            values: flag_keys::<C>().filter_map(|key| values_of(&key)).collect(),
            config_type: PhantomData,
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Data directory of a gateway, for commands that need nothing else.
#[derive(Debug, Args)]
pub(crate) struct DataDir {
    /// Data directory of the gateway
    #[arg(
        long,
        value_name = "DIR",
        env = "CAUSEWAY_DATA_DIR",
        default_value = "/var/lib/causeway"
    )]
    pub(crate) data_dir: PathBuf,
}
