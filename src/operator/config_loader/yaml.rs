//! Parses YAML into a JSON value, and records the line and column of each key and value.
//!
//! Composes the parser's events itself, because loaders keep either positions or duplicates, not both. Scalars follow YAML
//! 1.2's core schema (`no` is text). Anchors, tags and further documents are refused. With each of them, the position of a
//! value in the file would differ from the position at which it takes effect.

use std::borrow::Cow;
use std::collections::HashMap;

use saphyr_parser::{Event, Parser, ScalarStyle, ScanError, Span, StrInput, Tag};
use serde_json::{Map, Number, Value};

use super::path::ValuePath;

/// Maximum depth, which bounds recursion. No configuration is as deep.
const MAX_DEPTH: usize = 64;

/// Line and column, both from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position {
    pub(super) line: usize,
    pub(super) column: usize,
}

/// Positions of a value: its key (or dash) and the value itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KeyValuePositions {
    pub(super) key: Position,
    pub(super) value: Position,
}

/// Content of a YAML text.
#[derive(Debug)]
pub(super) struct YamlDocument {
    pub(super) value: Value,
    pub(super) positions: HashMap<String, KeyValuePositions>,
    /// Faults, each with its position, the path that it concerns, and its description. The path is empty for the text as a
    /// whole.
    pub(super) faults: Vec<(Position, String, String)>,
}

/// Parses one document. An empty document is an empty map.
pub(super) fn parse(text: &str) -> YamlDocument {
    let mut composer = Composer {
        parser: Parser::new_from_str(text),
        positions: HashMap::new(),
        faults: Vec::new(),
    };
    let value = composer.parse_document().unwrap_or_else(|error| {
        let position = Position::from_marker(*error.marker());
        composer.add_fault(
            position,
            &ValuePath::default(),
            format!("not YAML: {}", error.info()),
        );
        Value::Null
    });
    YamlDocument {
        value,
        positions: composer.positions,
        faults: composer.faults,
    }
}

/// Returns the value of a plain scalar in the core schema.
pub(super) fn parse_scalar(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => Value::Null,
        "true" | "True" | "TRUE" => true.into(),
        "false" | "False" | "FALSE" => false.into(),
        _ => parse_number(text).map_or_else(|| text.into(), Value::Number),
    }
}

fn parse_number(text: &str) -> Option<Number> {
    let with_radix = |prefix, radix| {
        let digits = text.strip_prefix(prefix)?;
        u64::from_str_radix(digits, radix).ok().map(Number::from)
    };
    let is_decimal = text
        .bytes()
        .all(|b| b.is_ascii_digit() || b"+-.eE".contains(&b));
    with_radix("0x", 16)
        .or_else(|| with_radix("0o", 8))
        .or_else(|| {
            if !is_decimal {
                return None;
            }
            let integer = text.parse::<u64>().map(Number::from);
            let integer = integer.or_else(|_| text.parse::<i64>().map(Number::from));
            integer
                .ok()
                .or_else(|| Number::from_f64(text.parse().ok()?))
        })
}

impl Position {
    fn from_marker(marker: saphyr_parser::Marker) -> Self {
        Self {
            line: marker.line(),
            column: marker.col() + 1,
        }
    }
}

struct Composer<'a> {
    parser: Parser<'a, StrInput<'a>>,
    positions: HashMap<String, KeyValuePositions>,
    faults: Vec<(Position, String, String)>,
}

impl<'a> Composer<'a> {
    fn add_fault(&mut self, position: Position, path: &ValuePath, message: impl Into<String>) {
        self.faults
            .push((position, path.to_string(), message.into()));
    }

    fn next_event(&mut self) -> Result<(Event<'a>, Position), ScanError> {
        let unexpected_end = || {
            ScanError::new_str(
                saphyr_parser::Marker::default(),
                "unexpected end of the text",
            )
        };
        let (event, span): (Event, Span) = self.parser.next().ok_or_else(unexpected_end)??;
        Ok((event, Position::from_marker(span.start)))
    }

    fn parse_document(&mut self) -> Result<Value, ScanError> {
        let mut value = Value::Object(Map::new());
        let mut documents = 0;
        loop {
            match self.next_event()? {
                (Event::StreamEnd, _) => return Ok(value),
                (Event::DocumentStart(_), position) => {
                    documents += 1;
                    let (event, start) = self.next_event()?;
                    let root = self.parse_node(event, start, &ValuePath::default())?;
                    if documents == 1 && !root.is_null() {
                        value = root;
                    } else if documents == 2 {
                        self.add_fault(
                            position,
                            &ValuePath::default(),
                            "a second document; a file may contain only one",
                        );
                    }
                }
                _ => {}
            }
        }
    }

    fn parse_node(
        &mut self,
        event: Event<'a>,
        position: Position,
        path: &ValuePath,
    ) -> Result<Value, ScanError> {
        if path.segments().len() > MAX_DEPTH {
            let marker = saphyr_parser::Marker::new(0, position.line, position.column - 1);
            return Err(ScanError::new_str(marker, "nested too deeply"));
        }
        match event {
            Event::Scalar(text, style, _, tag) => {
                Ok(self.parse_leaf(&text, style, tag, (position, path)))
            }
            Event::SequenceStart(..) => self.parse_sequence(path),
            Event::MappingStart(..) => self.parse_mapping(path),
            Event::Alias(_) => {
                self.add_fault(
                    position,
                    path,
                    "aliases are not supported; write the value out",
                );
                Ok(Value::Null)
            }
            _ => Ok(Value::Null),
        }
    }

    fn parse_leaf(
        &mut self,
        text: &str,
        style: ScalarStyle,
        tag: Option<Cow<'_, Tag>>,
        (position, path): (Position, &ValuePath),
    ) -> Value {
        match tag {
            Some(tag) if !(tag.is_yaml_core_schema() && tag.suffix == "str") => {
                self.add_fault(
                    position,
                    path,
                    format!("tag {tag} is not supported; remove it"),
                );
                Value::Null
            }
            None if style == ScalarStyle::Plain => parse_scalar(text),
            _ => text.into(),
        }
    }

    fn parse_sequence(&mut self, path: &ValuePath) -> Result<Value, ScanError> {
        let mut list = Vec::new();
        loop {
            let (event, position) = self.next_event()?;
            if event == Event::SequenceEnd {
                return Ok(Value::Array(list));
            }
            let path = path.index(list.len());
            self.positions.insert(
                path.to_string(),
                KeyValuePositions {
                    key: position,
                    value: position,
                },
            );
            list.push(self.parse_node(event, position, &path)?);
        }
    }

    fn parse_mapping(&mut self, path: &ValuePath) -> Result<Value, ScanError> {
        let mut map = Map::new();
        loop {
            let (event, key_position) = self.next_event()?;
            let key = match event {
                Event::MappingEnd => return Ok(Value::Object(map)),
                Event::Scalar(text, ..) => text,
                other => {
                    self.parse_node(other, key_position, path)?;
                    self.add_fault(key_position, path, "a key must be plain text");
                    "".into()
                }
            };
            let (event, position) = self.next_event()?;
            let path = path.key(&key);
            let text = path.to_string();
            if let Some(first_positions) = self.positions.get(&text).copied() {
                let message = format!(
                    "duplicate key; line {} already has it; keep one of the two",
                    first_positions.key.line
                );
                self.add_fault(key_position, &path, message);
                // Parsed without recording positions, so that those of the first occurrence stay.
                let saved_positions = std::mem::take(&mut self.positions);
                self.parse_node(event, position, &path)?;
                self.positions = saved_positions;
                continue;
            }
            self.positions.insert(
                text,
                KeyValuePositions {
                    key: key_position,
                    value: position,
                },
            );
            let value = self.parse_node(event, position, &path)?;
            map.insert(key.into_owned(), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn spot(line: usize, column: usize) -> Position {
        Position { line, column }
    }

    #[test]
    fn values_keep_their_line_and_column() {
        let document = parse("a: 1\nlist:\n  - name: x\n    port: 'y'\n");
        assert_eq!(
            document.value,
            json!({ "a": 1, "list": [{ "name": "x", "port": "y" }] })
        );
        let port = document.positions["list[0].port"];
        assert_eq!((port.key, port.value), (spot(4, 5), spot(4, 11)));
        assert_eq!(document.faults, []);
    }

    #[test]
    fn scalars_follow_the_core_schema() {
        let text = "[~, true, no, 12, -3, 0x10, 1.5, 10.0.0.0, 5s, '5', +7, 1e3, .]";
        let expected = json!([
            null, true, "no", 12, -3, 16, 1.5, "10.0.0.0", "5s", "5", 7, 1000.0, "."
        ]);
        assert_eq!(parse(text).value, expected);
    }

    #[test]
    fn duplicates_aliases_tags_and_documents_are_all_found() {
        let text = "a: &x 1\nb: *x\na: {c: 1}\nd: !!int 3\ne: !!str 3\n---\nf: 1\n";
        let document = parse(text);
        let lines: Vec<_> = document.faults.iter().map(|(spot, ..)| spot.line).collect();
        assert_eq!(lines, [2, 3, 4, 6], "{:?}", document.faults);
        assert_eq!(document.value["e"], json!("3"));
        assert_eq!(document.value["a"], json!(1));
    }

    #[test]
    fn invalid_yaml_is_reported_with_its_position() {
        for text in ["a: [1, 2\nb: 3\n", "a: \"x\n"] {
            let document = parse(text);
            assert!(
                document.faults[0].2.starts_with("not YAML"),
                "{text:?}: {document:?}"
            );
        }
        let deep = "[".repeat(1000);
        assert!(
            parse(&deep).faults[0].2.contains("deep") || parse(&deep).faults[0].2.contains("YAML")
        );
    }

    #[test]
    fn an_empty_text_is_an_empty_map() {
        for text in ["", "# only a comment\n", "---\n", "~"] {
            assert_eq!(parse(text).value, json!({}), "{text:?}");
        }
    }
}
