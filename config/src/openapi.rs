//! Operations of an admin listener, and the OpenAPI document that describes them.
//!
//! Gateway and edge make their routers and this document from one table. Schemas of bodies come from the types that are
//! serialised.

use schemars::{JsonSchema, Schema, SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};

/// Method and path of an admin listener, with its responses.
#[derive(Debug)]
pub struct Operation {
    /// Path in the syntax of OpenAPI and of axum: `/api/v1/edges/{node}`.
    pub path: &'static str,
    /// Whether the method is POST; otherwise it is GET.
    pub is_post: bool,
    summary: &'static str,
    responses: Vec<Response>,
}

/// Response of an operation.
#[derive(Clone, Copy, Debug)]
pub struct Response {
    status: u16,
    description: &'static str,
    media_types: &'static [&'static str],
    schema: fn(&mut SchemaGenerator) -> Schema,
}

impl Response {
    /// Returns a response with a text.
    pub fn text(status: u16, description: &'static str) -> Self {
        Self::body::<String>(status, description, &["text/plain"])
    }

    /// Returns a response with a body of these media types.
    pub fn body<T: JsonSchema>(
        status: u16,
        description: &'static str,
        media_types: &'static [&'static str],
    ) -> Self {
        Self {
            status,
            description,
            media_types,
            schema: SchemaGenerator::subschema_for::<T>,
        }
    }
}

impl Operation {
    /// Returns an operation of the method GET.
    pub fn get(path: &'static str, summary: &'static str) -> Self {
        Self {
            path,
            is_post: false,
            summary,
            responses: Vec::new(),
        }
    }

    /// Returns an operation of the method POST.
    pub fn post(path: &'static str, summary: &'static str) -> Self {
        let operation = Self::get(path, summary);
        Self {
            is_post: true,
            ..operation
        }
    }

    /// Adds a response with a text.
    #[must_use]
    pub fn text(self, status: u16, description: &'static str) -> Self {
        self.response(Response::text(status, description))
    }

    /// Adds the response 200 with a value in JSON.
    #[must_use]
    pub fn json<T: JsonSchema>(self, description: &'static str) -> Self {
        self.response(Response::body::<T>(200, description, &["application/json"]))
    }

    /// Adds the response 200 of `/metrics`, in either format of Prometheus.
    #[must_use]
    pub fn metrics(self) -> Self {
        let media_types = &["application/openmetrics-text", "text/plain"];
        self.response(Response::body::<String>(200, "Metrics", media_types))
    }

    /// Adds the responses of [`ReloadSender::handle_admin_request`](crate::ReloadSender::handle_admin_request).
    #[must_use]
    pub fn reload(self) -> Self {
        self.text(200, "The changes: the new configuration is in use")
            .text(403, "The request has a header `Origin`")
            .text(422, "The faults: the old configuration stays in use")
            .text(501, "The process does not read a configuration again")
    }

    /// Adds a response.
    #[must_use]
    pub fn response(mut self, response: Response) -> Self {
        self.responses.push(response);
        self
    }

    fn describe(&self, common: &[Response], schemas: &mut SchemaGenerator) -> Value {
        let method = if self.is_post { "post" } else { "get" };
        let segments = self.path.split(|c: char| !c.is_ascii_alphanumeric());
        let segments: Vec<&str> = segments.filter(|word| !word.is_empty()).collect();
        let mut operation = json!({
            "operationId": format!("{method}_{}", segments.join("_")),
            "summary": self.summary,
        });
        let parameters: Vec<Value> = self.path.split('/').filter_map(parameter).collect();
        if !parameters.is_empty() {
            operation["parameters"] = parameters.into();
        }
        for response in self.responses.iter().chain(common) {
            let schema = (response.schema)(schemas).to_value();
            let media_types = response.media_types.iter();
            let content: Map<String, Value> = media_types
                .map(|&media_type| (media_type.to_owned(), json!({ "schema": schema })))
                .collect();
            operation["responses"][response.status.to_string()] =
                json!({ "description": response.description, "content": content });
        }
        json!({ method: operation })
    }
}

fn parameter(segment: &str) -> Option<Value> {
    let name = segment.strip_prefix('{')?.strip_suffix('}')?;
    Some(json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string" } }))
}

/// Returns the OpenAPI 3.1 document of a listener. Every operation also has the `common` responses.
pub fn document<'a>(
    (title, version): (&str, &str),
    server: &str,
    operations: impl IntoIterator<Item = &'a Operation>,
    common: &[Response],
) -> Value {
    let settings = SchemaSettings::draft2020_12()
        .for_serialize()
        .with(|settings| settings.definitions_path = "/components/schemas".into());
    let mut schemas = settings.into_generator();
    let mut paths = Map::new();
    for operation in operations {
        let item = operation.describe(common, &mut schemas);
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        if let (Some(path), Value::Object(item)) = (path.as_object_mut(), item) {
            path.extend(item);
        }
    }
    json!({
        "openapi": "3.1.0",
        "info": { "title": title, "version": version },
        "servers": [{ "url": format!("http://{server}") }],
        "paths": paths,
        "components": { "schemas": schemas.take_definitions(true) },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(JsonSchema)]
    #[expect(dead_code, reason = "only the schema is read")]
    struct Row {
        /// Name.
        name: String,
    }

    #[test]
    fn methods_of_a_path_share_an_item_and_schemas_are_components() {
        let operations = [
            Operation::get("/rows/{name}", "One row").json::<Row>("The row"),
            Operation::post("/rows/{name}", "Change it").text(403, "Refused"),
        ];
        let common = [Response::text(504, "Late")];
        let found = document(("Rows", "1"), "localhost:1", &operations, &common);
        let item = &found["paths"]["/rows/{name}"];
        assert_eq!(item["get"]["operationId"], "get_rows_name");
        assert_eq!(item["get"]["parameters"][0]["name"], "name");
        let reference = &item["get"]["responses"]["200"]["content"]["application/json"]["schema"];
        assert_eq!(reference["$ref"], "#/components/schemas/Row");
        let schema = &found["components"]["schemas"]["Row"];
        assert_eq!(schema["properties"]["name"]["description"], "Name.");
        let statuses = item["post"]["responses"].as_object().unwrap().keys();
        assert_eq!(statuses.collect::<Vec<_>>(), ["403", "504"]);
    }
}
