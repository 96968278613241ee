//! Negotiation of the form of a response, from `Accept` as clients of Kubernetes write it.
//!
//! `Table` is not available: kubectl then accepts plain JSON, and prints names and ages.

use crate::protobuf;

/// Media type of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MediaType {
    Json,
    Protobuf,
}

/// Part of the objects that is in the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum View {
    /// The whole object.
    Whole,
    /// `PartialObjectMetadata`.
    Metadata,
}

/// Format and view of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Negotiated {
    pub(crate) format: MediaType,
    pub(crate) view: View,
}

impl Negotiated {
    /// Returns the first of the requested forms that is available, or JSON if none is named.
    pub(crate) fn negotiate(accept: Option<&str>, api_version: &str, kind: &str) -> Option<Self> {
        let Some(accept) = accept.filter(|accept| !accept.trim().is_empty()) else {
            return Some(Self::JSON);
        };
        accept
            .split(',')
            .find_map(|media_range| Self::parse_media_range(media_range, api_version, kind))
    }

    /// Whole objects, as JSON.
    pub(crate) const JSON: Self = Self {
        format: MediaType::Json,
        view: View::Whole,
    };

    fn parse_media_range(media_range: &str, api_version: &str, kind: &str) -> Option<Self> {
        let mut parts = media_range.split(';').map(str::trim);
        let format = match parts.next()?.to_ascii_lowercase().as_str() {
            "application/json" | "application/*" | "*/*" => MediaType::Json,
            "application/vnd.kubernetes.protobuf" => MediaType::Protobuf,
            _ => return None,
        };
        let parameter = |name: &str| {
            let mut parts = parts.clone();
            parts.find_map(|part| part.strip_prefix(name)?.strip_prefix('='))
        };
        let view = match parameter("as") {
            None => View::Whole,
            Some("PartialObjectMetadata" | "PartialObjectMetadataList") => View::Metadata,
            Some(_) => return None,
        };
        let is_meta_group = parameter("v").is_none_or(|version| version == "v1")
            && parameter("g").is_none_or(|group| group == "meta.k8s.io");
        if view != View::Whole && !is_meta_group {
            return None;
        }
        let is_available = match (format, view) {
            (MediaType::Json, _) | (MediaType::Protobuf, View::Metadata) => true,
            (MediaType::Protobuf, View::Whole) => protobuf::has_schema(api_version, kind),
        };
        is_available.then_some(Self { format, view })
    }

    pub(crate) fn content_type(self, watch: bool) -> &'static str {
        match (self.format, watch) {
            (MediaType::Json, _) => "application/json",
            (MediaType::Protobuf, false) => "application/vnd.kubernetes.protobuf",
            (MediaType::Protobuf, true) => "application/vnd.kubernetes.protobuf;stream=watch",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn negotiate(accept: &str, kind: &str) -> Option<(MediaType, View)> {
        let form = Negotiated::negotiate(Some(accept), "v1", kind);
        form.map(|form| (form.format, form.view))
    }

    #[test]
    fn accept_headers_of_common_clients_are_understood() {
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";
        let both = "application/vnd.kubernetes.protobuf,application/json";
        let metadata = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";
        let (json, protobuf) = (MediaType::Json, MediaType::Protobuf);
        for (accept, kind, expected) in [
            (table, "Service", Some((json, View::Whole))),
            (both, "Service", Some((protobuf, View::Whole))),
            (both, "Widget", Some((json, View::Whole))),
            (metadata, "Widget", Some((protobuf, View::Metadata))),
            (
                "application/vnd.kubernetes.protobuf;stream=watch",
                "Service",
                Some((protobuf, View::Whole)),
            ),
            ("*/*", "Service", Some((json, View::Whole))),
            (
                "application/json;as=Table;v=v1;g=meta.k8s.io",
                "Service",
                None,
            ),
            (
                "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json",
                "Service",
                Some((json, View::Whole)),
            ),
            ("application/vnd.kubernetes.protobuf", "Widget", None),
            ("text/html", "Service", None),
        ] {
            assert_eq!(negotiate(accept, kind), expected, "{accept}");
        }
        assert_eq!(
            Negotiated::negotiate(None, "v1", "Service"),
            Some(Negotiated::JSON)
        );
    }
}
