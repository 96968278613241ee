//! A request and its answer: discovery, get, list and watch, and a `Status` for whatever else.

use crate::{
    discovery,
    encode::Encoder,
    list,
    list_options::{ListOptions, RequestPath},
    negotiate::Negotiated,
    resource::GroupVersionResource,
    response_cache::ResponseCache,
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
const COMPRESS: usize = 8 * 1024;
/// The largest number of seconds that `Age` need hold (RFC 9111, 1.2.2).
const OLDEST: u64 = 1 << 31;

/// Memory limits of a cache, beside the objects themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLimits {
    /// Encoded answers, in bytes.
    pub cache: u64,
    /// Limit of the event buffer of each resource, in bytes.
    pub window: usize,
}

/// Subset of the objects that a client may read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessScope {
    /// Objects of these resources.
    pub resources: Vec<GroupVersionResource>,
    /// Namespaces of the objects; `None` stands for all namespaces, and objects without one.
    pub namespaces: Option<Vec<String>>,
}

/// The objects of several resources, and how they are served.
#[derive(Debug)]
pub struct WatchCache {
    stores: Vec<Arc<Store>>,
    cache: ResponseCache,
    /// Version that the cloud's API reports.
    release: Mutex<Option<Bytes>>,
}

impl WatchCache {
    /// A pool of these resources, with nothing in it.
    pub fn new(resources: &[GroupVersionResource], limits: &CacheLimits) -> Arc<Self> {
        let store =
            |resource: &GroupVersionResource| Arc::new(Store::new(resource.clone(), limits.window));
        Arc::new(Self {
            stores: resources.iter().map(store).collect(),
            cache: ResponseCache::new(limits.cache),
            release: Mutex::default(),
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
    pub fn release(&self, json: Bytes) {
        *self.release.lock().unwrap_or_else(PoisonError::into_inner) = Some(json);
    }

    /// Answers a request of a client that may read the objects in `grant`, or all objects without a grant.
    pub async fn answer(
        &self,
        head: &Parts,
        grant: Option<&AccessScope>,
    ) -> Response<ResponseBody> {
        let answered = self.serve(head, grant).await;
        let answer = answered.unwrap_or_else(|failure| failed(&failure));
        if head.method == Method::HEAD {
            return answer.map(|_| ResponseBody(Inner::Whole(Bytes::new())));
        }
        answer
    }

    async fn serve(
        &self,
        head: &Parts,
        grant: Option<&AccessScope>,
    ) -> Result<Response<ResponseBody>, ApiStatus> {
        let place = RequestPath::of(head.uri.path()).ok_or_else(ApiStatus::not_served)?;
        if head.method != Method::GET && head.method != Method::HEAD {
            return Err(ApiStatus::read_only());
        }
        let granted = |store: &&Arc<Store>| {
            grant.is_none_or(|grant| grant.resources.contains(store.resource()))
        };
        match place {
            RequestPath::Objects { .. } => {
                let store = self.stores.iter().find(|store| place.is(store.resource()));
                let store = store.ok_or_else(ApiStatus::not_served)?;
                if !granted(&store) {
                    return Err(ApiStatus::forbidden(&store.resource().to_string()));
                }
                let answered = self.objects(head, (&place, store), grant).await;
                Ok(answered.unwrap_or_else(|failure| dated(failed(&failure), store)))
            }
            RequestPath::Version => Ok(self.version()),
            RequestPath::Health => self.health(),
            _ => {
                let stores: Vec<_> = self.stores.iter().filter(granted).collect();
                let found = discovery::answer(&place, &stores);
                found
                    .map(|found| json_answer(&found))
                    .ok_or_else(ApiStatus::not_served)
            }
        }
    }

    /// Returns the health: good as soon as each resource has a state.
    fn health(&self) -> Result<Response<ResponseBody>, ApiStatus> {
        let empty = self.stores.iter().find(|store| store.version() == 0);
        match empty {
            Some(empty) => Err(ApiStatus::not_yet(empty.resource())),
            None => Ok(answered(
                "text/plain; charset=utf-8",
                Bytes::from_static(b"ok"),
            )),
        }
    }

    fn version(&self) -> Response<ResponseBody> {
        let known = self.release.lock().unwrap_or_else(PoisonError::into_inner);
        match &*known {
            Some(known) => answered("application/json", known.clone()),
            // The served API has not changed since this version.
            None => json_answer(&json!({ "major": "1", "minor": "30", "gitVersion": "v1.30.0" })),
        }
    }

    async fn objects(
        &self,
        head: &Parts,
        (place, store): (&RequestPath<'_>, &Arc<Store>),
        grant: Option<&AccessScope>,
    ) -> Result<Response<ResponseBody>, ApiStatus> {
        let RequestPath::Objects {
            namespace, name, ..
        } = *place
        else {
            return Err(ApiStatus::not_served());
        };
        let allowed = grant.and_then(|grant| grant.namespaces.as_ref());
        let is_allowed =
            |own: &str| allowed.is_none_or(|allowed| allowed.iter().any(|one| one == own));
        if allowed.is_some() && !namespace.is_some_and(is_allowed) {
            let whose = namespace.map_or("in all namespaces".to_owned(), |own| {
                format!("in namespace {own}")
            });
            return Err(ApiStatus::forbidden(&format!(
                "{} {whose}",
                store.resource()
            )));
        }
        let options = ListOptions::parse(head.uri.query().unwrap_or_default())?;
        let kind = store.kind().filter(|_| store.version() > 0);
        let kind = kind.ok_or_else(|| ApiStatus::not_yet(store.resource()))?;
        let accept = head
            .headers
            .get(ACCEPT)
            .and_then(|accept| accept.to_str().ok());
        let api_version = store.resource().api_version();
        let form = Negotiated::negotiate(accept, &api_version, &kind.kind);
        let encoding = Encoder {
            form: form.ok_or_else(ApiStatus::not_acceptable)?,
            api_version,
            kind: kind.kind,
        };
        if let Some(name) = name.filter(|_| !options.watch) {
            let key = (namespace.unwrap_or_default().into(), name.into());
            let object = store.get(&key);
            let object = object.ok_or_else(|| ApiStatus::not_found(store.resource(), name))?;
            let (bytes, form) = encoding.object(&object);
            let answer = answered(form.content_type(false), bytes);
            return Ok(dated(answer, store));
        }
        let by_name = name.map(|name| format!("metadata.name={name}"));
        let fields = [by_name.unwrap_or_default(), options.fields.clone()].join(",");
        let selector = Selector::parse(store.resource(), namespace, &options.labels, &fields);
        let selector = selector.map_err(ApiStatus::malformed)?;
        if options.watch {
            let with = (encoding, selector, self.cache.clone());
            let kind = with.0.form.content_type(true);
            let watch = Watch::begin(store, with, options).await?;
            let body = ResponseBody(Inner::Stream(watch.stream()));
            return Ok(dated(with_type(Response::new(body), kind), store));
        }
        self.list(head, store, (&encoding, &selector), &options)
            .await
    }

    async fn list(
        &self,
        head: &Parts,
        store: &Store,
        (encoding, selector): (&Encoder, &Selector),
        options: &ListOptions,
    ) -> Result<Response<ResponseBody>, ApiStatus> {
        let (version, from) = list::start_version(store, options).await?;
        // With resourceVersion=0 the whole list is returned without a limit, as kube-apiserver does.
        let limit = if options.resource_version == "0" {
            0
        } else {
            options.limit
        };
        let gzip = takes_gzip(&head.headers);
        let (history, newest, next) = store.position();
        let at = version.unwrap_or(newest);
        // The newest version also changes with the history.
        let parameters = (selector, &from, limit, gzip);
        let asked = format!(
            "{}@{at}/{next}/{}{parameters:?}{}",
            store.resource(),
            history.number,
            encoding.word()
        );
        let (bytes, form) = if let Some(bytes) = self.cache.get(&asked) {
            (bytes, encoding.form)
        } else {
            let page = list::page(store, (version, from.as_ref()), selector, limit)?;
            let (bytes, form) = encoding.list(&page);
            let packs = gzip && bytes.len() >= COMPRESS;
            let bytes = if packs { compressed(&bytes) } else { bytes };
            // If changes arrived meanwhile, this is not the requested version and is not cached.
            let is_it = form == encoding.form && page.version == at;
            if is_it {
                self.cache.put(&asked, &bytes);
            }
            (bytes, form)
        };
        let is_compressed = gzip && bytes.starts_with(&[0x1f, 0x8b]);
        let mut answer = answered(form.content_type(false), bytes);
        if is_compressed {
            let headers = answer.headers_mut();
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
            headers.insert(VARY, HeaderValue::from_static("accept, accept-encoding"));
        }
        Ok(dated(answer, store))
    }
}

fn takes_gzip(headers: &HeaderMap) -> bool {
    let mut fields = headers.get_all(ACCEPT_ENCODING).iter();
    fields.any(|field| {
        field
            .to_str()
            .is_ok_and(|text| text.split(',').any(|one| one.trim() == "gzip"))
    })
}

fn compressed(bytes: &Bytes) -> Bytes {
    let mut encoder = GzEncoder::new(Vec::with_capacity(bytes.len() / 4), Compression::fast());
    // Writing to memory cannot fail.
    match encoder.write_all(bytes).and_then(|()| encoder.finish()) {
        // Shrunk, because the cache counts the length and not the capacity.
        Ok(small) => small.into_boxed_slice().into(),
        Err(_) => bytes.clone(),
    }
}

fn answered(kind: &'static str, bytes: Bytes) -> Response<ResponseBody> {
    with_type(Response::new(ResponseBody(Inner::Whole(bytes))), kind)
}

fn with_type(mut answer: Response<ResponseBody>, kind: &'static str) -> Response<ResponseBody> {
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(
        "cache-control",
        HeaderValue::from_static("no-cache, private"),
    );
    answer
}

fn json_answer(value: &Value) -> Response<ResponseBody> {
    answered("application/json", Bytes::from(value.to_string()))
}

/// Adds the age of the view if it is not refreshed: `Age` for programs, and a warning that kubectl shows. A resource that was
/// never read has no age.
fn dated(mut answer: Response<ResponseBody>, store: &Store) -> Response<ResponseBody> {
    let is_view = store.version() > 0;
    if let Some(age) = store.age().filter(|_| is_view) {
        let seconds = age.as_secs().min(OLDEST);
        answer.headers_mut().insert(AGE, HeaderValue::from(seconds));
        let lasts = Duration::from_secs(seconds);
        let warning = format!(
            "299 causeway \"the API server is unreachable: this response is {lasts:?} old\""
        );
        if let Ok(warning) = HeaderValue::from_str(&warning) {
            answer.headers_mut().insert(WARNING, warning);
        }
    }
    answer
}

fn failed(failure: &ApiStatus) -> Response<ResponseBody> {
    let mut answer = json_answer(&failure.value());
    *answer.status_mut() = failure.status;
    if let Some(seconds) = failure.retry_after {
        answer
            .headers_mut()
            .insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    if failure.status == StatusCode::METHOD_NOT_ALLOWED {
        let allow = HeaderValue::from_static("GET, HEAD");
        answer.headers_mut().insert(http::header::ALLOW, allow);
    }
    answer.headers_mut().remove(CONTENT_LENGTH);
    answer
}

/// Body of a response: all at once, or a watch.
pub struct ResponseBody(Inner);

enum Inner {
    Whole(Bytes),
    Stream(BoxStream<'static, Bytes>),
}

impl ResponseBody {
    /// Whether the body is a watch, which goes on until its client or its timeout ends it.
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
