//! In what form an answer is wanted: `Accept`, as clients of Kubernetes write it.
//!
//! There is no `Table`: kubectl then takes plain JSON, and prints names and ages.

use crate::protobuf;

/// How an answer is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Json,
    Protobuf,
}

/// What of the objects is in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// All.
    Whole,
    /// `PartialObjectMetadata`.
    Metadata,
}

/// Format and shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Form {
    pub(crate) format: Format,
    pub(crate) shape: Shape,
}

impl Form {
    /// The first of the wanted forms that there is; JSON if none is named.
    pub(crate) fn negotiate(accept: Option<&str>, api_version: &str, kind: &str) -> Option<Self> {
        let Some(accept) = accept.filter(|accept| !accept.trim().is_empty()) else {
            return Some(Self::JSON);
        };
        accept
            .split(',')
            .find_map(|wanted| Self::of(wanted, api_version, kind))
    }

    /// All of it, as JSON.
    pub(crate) const JSON: Self = Self {
        format: Format::Json,
        shape: Shape::Whole,
    };

    fn of(wanted: &str, api_version: &str, kind: &str) -> Option<Self> {
        let mut parts = wanted.split(';').map(str::trim);
        let format = match parts.next()?.to_ascii_lowercase().as_str() {
            "application/json" | "application/*" | "*/*" => Format::Json,
            "application/vnd.kubernetes.protobuf" => Format::Protobuf,
            _ => return None,
        };
        let parameter = |name: &str| {
            let mut parts = parts.clone();
            parts.find_map(|part| part.strip_prefix(name)?.strip_prefix('='))
        };
        let shape = match parameter("as") {
            None => Shape::Whole,
            Some("PartialObjectMetadata" | "PartialObjectMetadataList") => Shape::Metadata,
            Some(_) => return None,
        };
        let of_meta = parameter("v").is_none_or(|version| version == "v1")
            && parameter("g").is_none_or(|group| group == "meta.k8s.io");
        if shape != Shape::Whole && !of_meta {
            return None;
        }
        let can = match (format, shape) {
            (Format::Json, _) | (Format::Protobuf, Shape::Metadata) => true,
            (Format::Protobuf, Shape::Whole) => protobuf::has(api_version, kind),
        };
        can.then_some(Self { format, shape })
    }

    pub(crate) fn content_type(self, watch: bool) -> &'static str {
        match (self.format, watch) {
            (Format::Json, _) => "application/json",
            (Format::Protobuf, false) => "application/vnd.kubernetes.protobuf",
            (Format::Protobuf, true) => "application/vnd.kubernetes.protobuf;stream=watch",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn negotiate(accept: &str, kind: &str) -> Option<(Format, Shape)> {
        let form = Form::negotiate(Some(accept), "v1", kind);
        form.map(|form| (form.format, form.shape))
    }

    #[test]
    fn what_clients_write_is_understood() {
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";
        let both = "application/vnd.kubernetes.protobuf,application/json";
        let metadata = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";
        let (json, protobuf) = (Format::Json, Format::Protobuf);
        for (accept, kind, expected) in [
            (table, "Service", Some((json, Shape::Whole))),
            (both, "Service", Some((protobuf, Shape::Whole))),
            (both, "Widget", Some((json, Shape::Whole))),
            (metadata, "Widget", Some((protobuf, Shape::Metadata))),
            (
                "application/vnd.kubernetes.protobuf;stream=watch",
                "Service",
                Some((protobuf, Shape::Whole)),
            ),
            ("*/*", "Service", Some((json, Shape::Whole))),
            (
                "application/json;as=Table;v=v1;g=meta.k8s.io",
                "Service",
                None,
            ),
            (
                "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json",
                "Service",
                Some((json, Shape::Whole)),
            ),
            ("application/vnd.kubernetes.protobuf", "Widget", None),
            ("text/html", "Service", None),
        ] {
            assert_eq!(negotiate(accept, kind), expected, "{accept}");
        }
        assert_eq!(Form::negotiate(None, "v1", "Service"), Some(Form::JSON));
    }
}
