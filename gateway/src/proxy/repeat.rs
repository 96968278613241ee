//! Step 6a, on a tunnel that does not answer: the request is sent once more, on another tunnel or through another gateway.
//!
//! A slow upstream is no reason for that: its tunnel answers the probe that follows each write. If the tunnel does not answer the
//! probe, or ends, and another tunnel or gateway holds the node, the request goes there as well. The first stream stays open
//! until one of both has answered: the head that comes first wins, and the other stream is reset.

use super::{context::StreamContext, peer, request::is_repeatable, response_head};
use crate::{
    error::{Error, Reason},
    state::{
        directory::{MIN_LATE, until_unanswered},
        registry::SelectedTunnel,
    },
};
use causeway_tunnel::{
    StreamKind, StreamReceiver, StreamSender,
    gateway_side::{OpenStream, StreamResponse},
    headers,
    request_target::TargetOverflow,
};
use futures_util::future::{Either, OptionFuture, select};
use http::{Request, Response};
use std::{pin::pin, time::Duration};
use tokio::{sync::Notify, time::sleep};

/// Largest head that is kept until the response, in bytes of [`headers::header_list_size`].
const MAX_KEPT_HEAD: usize = 8 << 10;
/// Interval of the search for another tunnel or gateway while a tunnel does not answer.
const SEARCH_INTERVAL: Duration = Duration::from_secs(1);

/// Response of an edge, the request half of its stream, and the tunnel or link of the stream if it is the second one.
type Answer = (
    Response<StreamReceiver>,
    StreamSender,
    Option<SelectedTunnel>,
);

/// Whether a plain request may be sent again, and its head is small enough to be kept for that.
pub(super) fn may_repeat(head: &Request<()>, end_stream: bool) -> bool {
    let target_len = head
        .uri()
        .path_and_query()
        .map_or(0, |path| path.as_str().len());
    is_repeatable(&StreamKind::Request, head.method(), end_stream)
        && head.extensions().get::<TargetOverflow>().is_none()
        && headers::header_list_size(head.headers()) + target_len <= MAX_KEPT_HEAD
}

/// Waits for the response on a stream, or on a second one if the tunnel of the first one does not answer.
///
/// # Errors
/// The failure of the first stream, if the second one fails too.
pub(super) async fn wait_for_response(
    ctx: StreamContext<'_>,
    OpenStream { send, mut response }: OpenStream,
    head: &Request<()>,
) -> Result<Answer, Error> {
    let late_report = Notify::new();
    let (failure, other) = tokio::select! {
        biased;
        answer = wait_for_head(ctx, &mut response, &late_report) => match answer {
            Ok(answer) => return Ok((answer, send, None)),
            Err(error) => {
                let other = (error.reason == Reason::TunnelLost).then(|| select_other(ctx));
                (Some(error), other.flatten())
            }
        },
        other = until_other(ctx, &late_report) => (None, Some(other)),
    };
    let first = async {
        if let Some(error) = failure {
            return Err(error);
        }
        let answer = wait_for_head(ctx, &mut response, &late_report).await?;
        Ok((answer, send, None))
    };
    match other.filter(|_| ctx.record.take_repetition()) {
        Some(other) => Box::pin(wait_for_either(ctx, first, (other, head))).await,
        None => Box::pin(first).await,
    }
}

/// Sends the request to another place as well, and waits for the first response.
async fn wait_for_either(
    ctx: StreamContext<'_>,
    first: impl Future<Output = Result<Answer, Error>>,
    (other, head): (SelectedTunnel, &Request<()>),
) -> Result<Answer, Error> {
    let mut first = pin!(first);
    let (answer, send, _) = {
        let second = pin!(send_second(ctx, &other, head));
        match select(second, first.as_mut()).await {
            Either::Left((Ok(answer), _)) => answer,
            Either::Left((Err(_), first)) => return first.await,
            Either::Right((Ok(answer), _)) => return Ok(answer),
            Either::Right((Err(error), second)) => second.await.map_err(|_| error)?,
        }
    };
    ctx.record.set_tunnel(other.id);
    Ok((answer, send, Some(other)))
}

/// Sends the request on a second stream. Interim responses of that stream are discarded, because the client may have got those of the
/// first one.
async fn send_second(
    ctx: StreamContext<'_>,
    other: &SelectedTunnel,
    head: &Request<()>,
) -> Result<Answer, Error> {
    let shared = &ctx.proxy.shared;
    let _repetition = shared.limits.admit_repetition().await;
    let _stream = shared.limits.admit_node(&other.streams)?;
    // Another pod may have got the address during the wait.
    ctx.proxy.check_same_pod(ctx.client, ctx.route)?;
    let ctx = ctx.moved_to(Some(other));
    let OpenStream { send, mut response } = peer::open_repeated(ctx, head.clone()).await?;
    shared.metrics.count_repeated_request();
    tracing::debug!(node = %ctx.route.node, "a request was repeated on another tunnel");
    let answered = async {
        while response.next_informational().await?.is_some() {}
        response.await
    };
    let answer = (answered.await).map_err(|error| peer::stream_error(ctx, &error))?;
    peer::check_rejection(ctx, answer.headers())?;
    Ok((answer, send, None))
}

/// Waits for the final response of an edge, and forwards interim ones. Notifies `late_report` when the peer reports that its tunnel
/// does not answer.
async fn wait_for_head(
    ctx: StreamContext<'_>,
    response: &mut StreamResponse,
    late_report: &Notify,
) -> Result<Response<StreamReceiver>, Error> {
    let answered = async {
        let is_late = |interim: &Response<()>| peer::says_late(ctx, interim);
        while response_head::forward_interims(ctx, response, is_late).await? {
            late_report.notify_one();
        }
        response.await
    };
    let answer = (answered.await).map_err(|error| peer::stream_error(ctx, &error))?;
    peer::check_rejection(ctx, answer.headers())?;
    Ok(answer)
}

/// Waits until the tunnel of the context does not answer, or that of its peer, and another place has the node. The peer reports each
/// second that its tunnel does not answer.
async fn until_other(ctx: StreamContext<'_>, late_report: &Notify) -> SelectedTunnel {
    loop {
        tokio::select! {
            () = until_unanswered(ctx.tunnel, MIN_LATE) => {}
            Some(()) = OptionFuture::from(ctx.peer.map(|_| late_report.notified())) => {}
        }
        if let Some(other) = select_other(ctx) {
            return other;
        }
        sleep(SEARCH_INTERVAL).await;
    }
}

fn select_other(ctx: StreamContext<'_>) -> Option<SelectedTunnel> {
    let current = (ctx.id, ctx.peer.map(AsRef::as_ref));
    (ctx.proxy.shared.registry).select_other(&ctx.route.node, current)
}
