//! List and watch requests, shared by HTTP/1.1 to a pool member and HTTP/2 to a gateway: builds the request and converts the
//! streamed response.

use bytes::Bytes;
use causeway_watch_cache::SourceResponse;
use futures_util::stream::{StreamExt, unfold};
use http::{
    HeaderMap, Request, Response,
    header::{ACCEPT, HeaderValue, USER_AGENT},
};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use std::error::Error;

const USER_AGENT_VALUE: &str = concat!("causeway-edge/", env!("CARGO_PKG_VERSION"));

pub(super) fn build_request(
    uri: &str,
    mut headers: HeaderMap,
) -> Result<Request<Full<Bytes>>, String> {
    headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
    headers.insert(USER_AGENT, HeaderValue::from_static(USER_AGENT_VALUE));
    let request = Request::get(uri).body(Full::default());
    let mut request = request.map_err(|error| error.to_string())?;
    *request.headers_mut() = headers;
    Ok(request)
}

/// Converts a response into the form that a store reads.
pub(super) fn to_source_response(response: Response<Incoming>) -> SourceResponse {
    let (head, body) = response.into_parts();
    let body = unfold(body, async |mut body| {
        loop {
            match body.frame().await? {
                Ok(frame) => {
                    // Trailers are ignored.
                    if let Ok(bytes) = frame.into_data() {
                        return Some((Ok(bytes), body));
                    }
                }
                Err(error) => return Some((Err(error_chain(&error)), body)),
            }
        }
    });
    SourceResponse {
        status: head.status,
        headers: head.headers,
        body: body.boxed(),
    }
}

/// Returns the text of the error and of its causes, because hyper's own text has little detail.
pub(super) fn error_chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(current) = cause {
        text = format!("{text}: {current}");
        cause = current.source();
    }
    text
}
