//! Requests and their responses: discovery, get, list and watch, and a `Status` for all others.

use crate::{
    discovery,
    encode::{Encoder, ResponseCache},
    list,
    list_options::{ListOptions, RequestPath},
    negotiate::Negotiated,
    resource::GroupVersionResource,
    selector::Selector,
    status::ApiStatus,
    store::Store,
    watch::Watch,
};
use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use futures_util::stream::{BoxStream, StreamExt};
use http::{
    HeaderMap, HeaderValue, Method, Response, StatusCode,
    header::{
        ACCEPT, ACCEPT_ENCODING, AGE, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER,
        VARY, WARNING,
    },
    request::Parts,
};
use http_body::{Frame, SizeHint};
use serde_json::{Value, json};
use std::{
    convert::Infallible,
    io::Write,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

/// Size from which responses are compressed for clients that accept it, in bytes.
const MIN_COMPRESS_BYTES: usize = 8 * 1024;
/// Maximum number of seconds in `Age` that recipients must support (RFC 9111, 1.2.2).
const MAX_AGE_SECONDS: u64 = 1 << 31;

/// Memory limits of a cache, beside the objects themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLimits {
    /// Limit of the encoded responses, in bytes.
    pub response_bytes: u64,
    /// Limit of the event buffer of each resource, in bytes.
    pub event_buffer_bytes: usize,
}

/// Subset of the objects that a client may read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessScope {
    /// Resources of the objects.
    pub resources: Vec<GroupVersionResource>,
    /// Namespaces of the objects. `None` stands for all namespaces and for objects without one.
    pub namespaces: Option<Vec<String>>,
}

/// Cache of the objects of several resources, and the server of these objects.
#[derive(Debug)]
pub struct WatchCache {
    stores: Vec<Arc<Store>>,
    response_cache: ResponseCache,
    /// Version that the cloud's API reports.
    version_info: Mutex<Option<Bytes>>,
}

impl WatchCache {
    /// Creates an empty cache of these resources.
    pub fn new(resources: &[GroupVersionResource], limits: &CacheLimits) -> Arc<Self> {
        let store = |resource: &GroupVersionResource| {
            Arc::new(Store::new(resource.clone(), limits.event_buffer_bytes))
        };
        Arc::new(Self {
            stores: resources.iter().map(store).collect(),
            response_cache: ResponseCache::new(limits.response_bytes),
            version_info: Mutex::default(),
        })
    }

    /// Returns the stores, one for each resource.
    pub fn stores(&self) -> &[Arc<Store>] {
        &self.stores
    }

    /// Returns the store of a resource.
    pub fn store(&self, resource: &GroupVersionResource) -> Option<&Arc<Store>> {
        self.stores
            .iter()
            .find(|store| store.resource() == resource)
    }

    /// Sets the version that the cloud's API reports (`version.Info`), as JSON; served at `/version`.
    pub fn set_version_info(&self, json: Bytes) {
        *self
            .version_info
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(json);
    }

    /// Responds to a request of a client that may read the objects in `scope`, or all objects without a scope.
    pub async fn handle_request(
        &self,
        head: &Parts,
        scope: Option<&AccessScope>,
    ) -> Response<ResponseBody> {
        let result = self.dispatch(head, scope).await;
        let response = result.unwrap_or_else(|failure| error_response(&failure));
        if head.method == Method::HEAD {
            return response.map(|_| ResponseBody(Inner::Whole(Bytes::new())));
        }
        response
    }

    async fn dispatch(
        &self,
        head: &Parts,
        scope: Option<&AccessScope>,
    ) -> Result<Response<ResponseBody>, ApiStatus> {
        let path = RequestPath::parse(head.uri.path()).ok_or_else(ApiStatus::not_served)?;
        if head.method != Method::GET && head.method != Method::HEAD {
            return Err(ApiStatus::read_only());
        }
        let is_granted = |store: &&Arc<Store>| {
            scope.is_none_or(|grant| grant.resources.contains(store.resource()))
        };
        match path {
            RequestPath::Objects { .. } => {
                let store = self
                    .stores
                    .iter()
                    .find(|store| path.matches_resource(store.resource()));
                let store = store.ok_or_else(ApiStatus::not_served)?;
                if !is_granted(&store) {
                    return Err(ApiStatus::forbidden(&store.resource().to_string()));
                }
                let result = self.serve_objects(head, (&path, store), scope).await;
                Ok(result.unwrap_or_else(|failure| with_age(error_response(&failure), store)))
            }
            RequestPath::Version => Ok(self.version_response()),
            RequestPath::Health => self.health(),
            _ => {
                let stores: Vec<_> = self.stores.iter().filter(is_granted).collect();
                let document = discovery::discovery_response(&path, &stores);
                document
                    .map(|document| json_response(&document))
                    .ok_or_else(ApiStatus::not_served)
            }
        }
    }

    /// Returns the health, which is good once each resource has a state.
    fn health(&self) -> Result<Response<ResponseBody>, ApiStatus> {
        let unfilled = self.stores.iter().find(|store| store.version() == 0);
        match unfilled {
            Some(unfilled) => Err(ApiStatus::not_loaded(unfilled.resource())),
            None => Ok(ok_response(
                "text/plain; charset=utf-8",
                Bytes::from_static(b"ok"),
            )),
        }
    }

    fn version_response(&self) -> Response<ResponseBody> {
        let version_info = self
            .version_info
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match &*version_info {
            Some(version_info) => ok_response("application/json", version_info.clone()),
            // The served API has not changed since this version.
            None => json_response(&json!({ "major": "1", "minor": "30", "gitVersion": "v1.30.0" })),
        }
    }

    async fn serve_objects(
        &self,
        head: &Parts,
        (path, store): (&RequestPath<'_>, &Arc<Store>),
        scope: Option<&AccessScope>,
    ) -> Result<Response<ResponseBody>, ApiStatus> {
        let RequestPath::Objects {
            namespace, name, ..
        } = *path
        else {
            return Err(ApiStatus::not_served());
        };
        let allowed_namespaces = scope.and_then(|grant| grant.namespaces.as_ref());
        let is_allowed = |own: &str| {
            allowed_namespaces.is_none_or(|allowed| allowed.iter().any(|one| one == own))
        };
        if allowed_namespaces.is_some() && !namespace.is_some_and(is_allowed) {
            let requested_scope = namespace.map_or("in all namespaces".to_owned(), |own| {
                format!("in namespace {own}")
            });
            return Err(ApiStatus::forbidden(&format!(
                "{} {requested_scope}",
                store.resource()
            )));
        }
        let options = ListOptions::parse(head.uri.query().unwrap_or_default())?;
        let kind = store.kind().filter(|_| store.version() > 0);
        let kind = kind.ok_or_else(|| ApiStatus::not_loaded(store.resource()))?;
        let accept = head
            .headers
            .get(ACCEPT)
            .and_then(|accept| accept.to_str().ok());
        let api_version = store.resource().api_version();
        let negotiated = Negotiated::negotiate(accept, &api_version, &kind.kind);
        let encoder = Encoder {
            negotiated: negotiated.ok_or_else(ApiStatus::not_acceptable)?,
            api_version,
            kind: kind.kind,
        };
        if let Some(name) = name.filter(|_| !options.watch) {
            let key = (namespace.unwrap_or_default().into(), name.into());
            let object = store.get(&key);
            let object = object.ok_or_else(|| ApiStatus::not_found(store.resource(), name))?;
            let (bytes, form) = encoder.encode_object(&object);
            let response = ok_response(form.content_type(false), bytes);
            return Ok(with_age(response, store));
        }
        let name_selector = name.map(|name| format!("metadata.name={name}"));
        let fields = [name_selector.unwrap_or_default(), options.fields.clone()].join(",");
        let selector = Selector::parse(store.resource(), namespace, &options.labels, &fields);
        let selector = selector.map_err(ApiStatus::malformed)?;
        if options.watch {
            let watch_arguments = (encoder, selector, self.response_cache.clone());
            let content_type = watch_arguments.0.negotiated.content_type(true);
            let watch = Watch::start(store, watch_arguments, options).await?;
            let body = ResponseBody(Inner::Stream(watch.stream()));
            return Ok(with_age(
                with_content_type(Response::new(body), content_type),
                store,
            ));
        }
        self.serve_list(head, store, (&encoder, &selector), &options)
            .await
    }

    async fn serve_list(
        &self,
        head: &Parts,
        store: &Store,
        (encoder, selector): (&Encoder, &Selector),
        options: &ListOptions,
    ) -> Result<Response<ResponseBody>, ApiStatus> {
        let (version, continue_token) = list::start_version(store, options).await?;
        // With resourceVersion=0 the whole list is returned without a limit, as kube-apiserver does.
        let limit = if options.resource_version == "0" {
            0
        } else {
            options.limit
        };
        let accepts_compression = accepts_gzip(&head.headers);
        let (epoch, newest, next_event) = store.position();
        let list_version = version.unwrap_or(newest);
        // The newest version also changes with the history.
        let parameters = (selector, &continue_token, limit, accepts_compression);
        let cache_key = format!(
            "{}@{list_version}/{next_event}/{}{parameters:?}{}",
            store.resource(),
            epoch.restarts,
            encoder.cache_key()
        );
        let (bytes, form) = if let Some(bytes) = self.response_cache.get(&cache_key) {
            (bytes, encoder.negotiated)
        } else {
            let page = list::list_page(store, (version, continue_token.as_ref()), selector, limit)?;
            let (bytes, form) = encoder.encode_list(&page);
            let should_compress = accepts_compression && bytes.len() >= MIN_COMPRESS_BYTES;
            let bytes = if should_compress {
                gzip_compress(&bytes)
            } else {
                bytes
            };
            // If changes arrived meanwhile, this is not the requested version and is not cached.
            let is_requested_version = form == encoder.negotiated && page.version == list_version;
            if is_requested_version {
                self.response_cache.put(&cache_key, &bytes);
            }
            (bytes, form)
        };
        let is_compressed = accepts_compression && bytes.starts_with(&[0x1f, 0x8b]);
        let mut response = ok_response(form.content_type(false), bytes);
        if is_compressed {
            let headers = response.headers_mut();
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
            headers.insert(VARY, HeaderValue::from_static("accept, accept-encoding"));
        }
        Ok(with_age(response, store))
    }
}

fn accepts_gzip(headers: &HeaderMap) -> bool {
    let mut fields = headers.get_all(ACCEPT_ENCODING).iter();
    fields.any(|field| {
        field
            .to_str()
            .is_ok_and(|text| text.split(',').any(|one| one.trim() == "gzip"))
    })
}

fn gzip_compress(bytes: &Bytes) -> Bytes {
    let mut encoder = GzEncoder::new(Vec::with_capacity(bytes.len() / 4), Compression::fast());
    // Writing to memory cannot fail.
    match encoder.write_all(bytes).and_then(|()| encoder.finish()) {
        // Shrunk, because the cache counts the length and not the capacity.
        Ok(compressed) => compressed.into_boxed_slice().into(),
        Err(_) => bytes.clone(),
    }
}

fn ok_response(content_type: &'static str, bytes: Bytes) -> Response<ResponseBody> {
    with_content_type(
        Response::new(ResponseBody(Inner::Whole(bytes))),
        content_type,
    )
}

fn with_content_type(
    mut response: Response<ResponseBody>,
    content_type: &'static str,
) -> Response<ResponseBody> {
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(
        "cache-control",
        HeaderValue::from_static("no-cache, private"),
    );
    response
}

fn json_response(value: &Value) -> Response<ResponseBody> {
    ok_response("application/json", Bytes::from(value.to_string()))
}

/// Adds the age of the data if it is not refreshed: `Age` for programs, and a warning that kubectl shows. A resource that was
/// never read has no age.
fn with_age(mut response: Response<ResponseBody>, store: &Store) -> Response<ResponseBody> {
    let has_state = store.version() > 0;
    if let Some(age) = store.stale_age().filter(|_| has_state) {
        let seconds = age.as_secs().min(MAX_AGE_SECONDS);
        response
            .headers_mut()
            .insert(AGE, HeaderValue::from(seconds));
        let rounded_age = Duration::from_secs(seconds);
        let warning = format!(
            "299 causeway \"the API server is unreachable: this response is {rounded_age:?} old\""
        );
        if let Ok(warning) = HeaderValue::from_str(&warning) {
            response.headers_mut().insert(WARNING, warning);
        }
    }
    response
}

fn error_response(failure: &ApiStatus) -> Response<ResponseBody> {
    let mut response = json_response(&failure.to_json());
    *response.status_mut() = failure.status;
    if let Some(seconds) = failure.retry_after {
        response
            .headers_mut()
            .insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    if failure.status == StatusCode::METHOD_NOT_ALLOWED {
        let allow = HeaderValue::from_static("GET, HEAD");
        response.headers_mut().insert(http::header::ALLOW, allow);
    }
    response.headers_mut().remove(CONTENT_LENGTH);
    response
}

/// Body of a response: all at once, or a watch.
pub struct ResponseBody(Inner);

enum Inner {
    Whole(Bytes),
    Stream(BoxStream<'static, Bytes>),
}

impl ResponseBody {
    /// Whether the body is a watch, which continues until its client closes it or its timeout has passed.
    pub fn is_watch(&self) -> bool {
        matches!(self.0, Inner::Stream(_))
    }
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut self.0 {
            Inner::Whole(bytes) if bytes.is_empty() => Poll::Ready(None),
            Inner::Whole(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Inner::Stream(stream) => stream
                .poll_next_unpin(context)
                .map(|next| next.map(|bytes| Ok(Frame::data(bytes)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(&self.0, Inner::Whole(bytes) if bytes.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Inner::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Inner::Stream(_) => SizeHint::default(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
