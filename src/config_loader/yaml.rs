//! YAML text → a JSON value, and the line and column of each key and value in it.
//!
//! Composes the parser's events itself, because loaders keep either positions or
//! duplicates, not both. Scalars follow YAML 1.2's core schema (`no` is text). Anchors,
//! tags and further documents are refused: each would let a value stand elsewhere than
//! where it is read.

use std::borrow::Cow;
use std::collections::HashMap;

use saphyr_parser::{Event, Parser, ScalarStyle, ScanError, Span, StrInput, Tag};
use serde_json::{Map, Number, Value};

use super::path::ValuePath;

/// Deeper than any configuration; a bound on recursion.
const DEPTH: usize = 64;

/// A line and a column, both from 1.
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
    pub(super) spots: HashMap<String, KeyValuePositions>,
    /// Each with the path that it is about; empty for the text as a whole.
    pub(super) faults: Vec<(Position, String, String)>,
}

/// Reads one document. An empty one is an empty map.
pub(super) fn parse(text: &str) -> YamlDocument {
    let mut composer = Composer {
        parser: Parser::new_from_str(text),
        spots: HashMap::new(),
        faults: Vec::new(),
    };
    let value = composer.document().unwrap_or_else(|error| {
        let spot = Position::from_marker(*error.marker());
        composer.fault(
            spot,
            &ValuePath::default(),
            format!("not YAML: {}", error.info()),
        );
        Value::Null
    });
    YamlDocument {
        value,
        spots: composer.spots,
        faults: composer.faults,
    }
}

/// A plain scalar's meaning in the core schema.
pub(super) fn scalar(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => Value::Null,
        "true" | "True" | "TRUE" => true.into(),
        "false" | "False" | "FALSE" => false.into(),
        _ => number(text).map_or_else(|| text.into(), Value::Number),
    }
}

fn number(text: &str) -> Option<Number> {
    let radix = |prefix, radix| {
        let digits = text.strip_prefix(prefix)?;
        u64::from_str_radix(digits, radix).ok().map(Number::from)
    };
    let decimal = text
        .bytes()
        .all(|b| b.is_ascii_digit() || b"+-.eE".contains(&b));
    radix("0x", 16).or_else(|| radix("0o", 8)).or_else(|| {
        if !decimal {
            return None;
        }
        let whole = text.parse::<u64>().map(Number::from);
        let whole = whole.or_else(|_| text.parse::<i64>().map(Number::from));
        whole.ok().or_else(|| Number::from_f64(text.parse().ok()?))
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
    spots: HashMap<String, KeyValuePositions>,
    faults: Vec<(Position, String, String)>,
}

impl<'a> Composer<'a> {
    fn fault(&mut self, spot: Position, path: &ValuePath, message: impl Into<String>) {
        self.faults.push((spot, path.to_string(), message.into()));
    }

    fn next(&mut self) -> Result<(Event<'a>, Position), ScanError> {
        let end = || {
            ScanError::new_str(
                saphyr_parser::Marker::default(),
                "unexpected end of the text",
            )
        };
        let (event, span): (Event, Span) = self.parser.next().ok_or_else(end)??;
        Ok((event, Position::from_marker(span.start)))
    }

    fn document(&mut self) -> Result<Value, ScanError> {
        let mut value = Value::Object(Map::new());
        let mut documents = 0;
        loop {
            match self.next()? {
                (Event::StreamEnd, _) => return Ok(value),
                (Event::DocumentStart(_), spot) => {
                    documents += 1;
                    let (event, start) = self.next()?;
                    let root = self.node(event, start, &ValuePath::default())?;
                    if documents == 1 && !root.is_null() {
                        value = root;
                    } else if documents == 2 {
                        self.fault(
                            spot,
                            &ValuePath::default(),
                            "a second document; a file may contain only one",
                        );
                    }
                }
                _ => {}
            }
        }
    }

    fn node(
        &mut self,
        event: Event<'a>,
        spot: Position,
        path: &ValuePath,
    ) -> Result<Value, ScanError> {
        if path.steps().len() > DEPTH {
            let marker = saphyr_parser::Marker::new(0, spot.line, spot.column - 1);
            return Err(ScanError::new_str(marker, "nested too deeply"));
        }
        match event {
            Event::Scalar(text, style, _, tag) => Ok(self.leaf(&text, style, tag, (spot, path))),
            Event::SequenceStart(..) => self.sequence(path),
            Event::MappingStart(..) => self.mapping(path),
            Event::Alias(_) => {
                self.fault(spot, path, "aliases are not supported; write the value out");
                Ok(Value::Null)
            }
            _ => Ok(Value::Null),
        }
    }

    fn leaf(
        &mut self,
        text: &str,
        style: ScalarStyle,
        tag: Option<Cow<'_, Tag>>,
        (spot, path): (Position, &ValuePath),
    ) -> Value {
        match tag {
            Some(tag) if !(tag.is_yaml_core_schema() && tag.suffix == "str") => {
                self.fault(spot, path, format!("tag {tag} is not supported; remove it"));
                Value::Null
            }
            None if style == ScalarStyle::Plain => scalar(text),
            _ => text.into(),
        }
    }

    fn sequence(&mut self, path: &ValuePath) -> Result<Value, ScanError> {
        let mut list = Vec::new();
        loop {
            let (event, spot) = self.next()?;
            if event == Event::SequenceEnd {
                return Ok(Value::Array(list));
            }
            let path = path.index(list.len());
            self.spots.insert(
                path.to_string(),
                KeyValuePositions {
                    key: spot,
                    value: spot,
                },
            );
            list.push(self.node(event, spot, &path)?);
        }
    }

    fn mapping(&mut self, path: &ValuePath) -> Result<Value, ScanError> {
        let mut map = Map::new();
        loop {
            let (event, key_spot) = self.next()?;
            let key = match event {
                Event::MappingEnd => return Ok(Value::Object(map)),
                Event::Scalar(text, ..) => text,
                other => {
                    self.node(other, key_spot, path)?;
                    self.fault(key_spot, path, "a key must be plain text");
                    "".into()
                }
            };
            let (event, spot) = self.next()?;
            let path = path.key(&key);
            let text = path.to_string();
            if let Some(first) = self.spots.get(&text).copied() {
                let message = format!(
                    "duplicate key; line {} already has it; keep one of the two",
                    first.key.line
                );
                self.fault(key_spot, &path, message);
                // Parsed without recording positions, so that those of the first occurrence stay.
                let spots = std::mem::take(&mut self.spots);
                self.node(event, spot, &path)?;
                self.spots = spots;
                continue;
            }
            self.spots.insert(
                text,
                KeyValuePositions {
                    key: key_spot,
                    value: spot,
                },
            );
            let value = self.node(event, spot, &path)?;
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
        let port = document.spots["list[0].port"];
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
