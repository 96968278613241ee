//! Receiving: bytes of the peer become changes of the state. Every rule about the peer's frames is here.

use super::{
    connection::State,
    error::{Error, Initiator, Reason},
    flow::{MAX_WINDOW, RecvWindow, SendWindow},
    frame::{self, HEAD_LEN, Head, PREFACE, Settings, flag, kind},
    frame_limit::FrameLimit,
    hpack::DecodeError,
    message::{self, Collected},
    receiving::{Block, Data},
    streams::{Content, Half, Key, Stream},
};
use bytes::{Buf, Bytes, BytesMut};
use http::{Method, Request, Response, StatusCode};

/// Maximum number of DATA frames without a payload between two that a reader gets.
const MAX_EMPTY_FRAMES: usize = 10_000;
/// Maximum number of interim responses that a stream holds for its reader, who has a limit of 1,000 for all of them. Together
/// they are no larger than one header list may be.
const MAX_INTERIM: usize = 1_024;
/// Maximum size of a header list if the configuration has none.
const DEFAULT_MAX_HEADER_LIST: u32 = 16 << 20;
/// Bytes that a read after the end counts for at least.
const MIN_DISCARDED: usize = 1 << 10;
/// Least average size of the frames of a long header block: peers with smaller ones flood (CVE-2024-27316).
const MIN_BLOCK_FRAME: usize = 4096;
/// Payload of frames other than DATA, in bytes, that counts as one more frame.
const BYTES_PER_FRAME: usize = 512;
/// Number of such frames that any block may have.
const MIN_BLOCK_FRAMES: usize = 8;

impl State {
    /// Processes what the peer has sent. `buffer` is number and capacity of the buffer behind `read`. Returns the number of bytes
    /// that must be there before the next call can do more.
    pub(super) fn receive(&mut self, read: &mut BytesMut, buffer: (u64, usize)) -> usize {
        if self.end.is_some() {
            // Otherwise a peer that sends byte by byte would keep the connection.
            self.discarded += read.len().max(MIN_DISCARDED);
            read.clear();
            return 0;
        }
        match self.receive_frames(read, buffer) {
            Ok(needed) => needed,
            Err(reason) => {
                self.fail(reason);
                read.clear();
                0
            }
        }
    }

    fn receive_frames(
        &mut self,
        read: &mut BytesMut,
        buffer: (u64, usize),
    ) -> Result<usize, Reason> {
        if !self.receive_preface(read)? {
            return Ok(1);
        }
        loop {
            if self.receiving.data.is_some() {
                if !self.receive_payload(read, buffer) {
                    return Ok(1);
                }
                continue;
            }
            let Some(head) = Head::parse(read) else {
                return Ok(HEAD_LEN);
            };
            self.receiving.last_kind = head.kind;
            self.check_head(head)?;
            if head.kind == kind::DATA {
                if head.has(flag::PADDED) && head.length == 0 {
                    return Err(Reason::FRAME_SIZE_ERROR);
                }
                let head_len = HEAD_LEN + usize::from(head.has(flag::PADDED));
                if read.len() < head_len {
                    return Ok(head_len);
                }
                let padding = head.has(flag::PADDED).then(|| usize::from(read[HEAD_LEN]));
                read.advance(head_len);
                self.receiving.frames += 1;
                self.receive_data_head(head, padding)?;
                self.check_unsent()?;
                continue;
            }
            let frame_len = HEAD_LEN + head.length;
            let Some(payload) = read.get(HEAD_LEN..frame_len) else {
                return Ok(frame_len);
            };
            self.receiving.frames += 1;
            // The fields of a long block take as much time as several frames.
            self.receiving.frames += head.length / BYTES_PER_FRAME;
            self.charge(|limit| limit.charge(head))?;
            self.receive_frame(head, payload)?;
            self.check_unsent()?;
            read.advance(frame_len);
        }
    }

    /// Charges the peer if its frames are limited.
    fn charge(&mut self, charge: impl FnOnce(&mut FrameLimit) -> bool) -> Result<(), Reason> {
        let Some(limit) = &mut self.frame_limit else {
            return Ok(());
        };
        if charge(limit) {
            return Ok(());
        }
        self.receiving.last_kind = limit.costliest_kind();
        Err(Reason::ENHANCE_YOUR_CALM)
    }

    /// Returns whether the preface is complete (RFC 9113 section 3.4).
    fn receive_preface(&mut self, read: &mut BytesMut) -> Result<bool, Reason> {
        let left = self.receiving.preface_left;
        let count = left.min(read.len());
        let start = PREFACE.len() - left;
        if read[..count] != PREFACE[start..start + count] {
            return Err(Reason::PROTOCOL_ERROR);
        }
        read.advance(count);
        self.receiving.preface_left -= count;
        Ok(count == left)
    }

    /// Checks what can be known before the payload is there.
    fn check_head(&mut self, head: Head) -> Result<(), Reason> {
        if head.length > self.config.settings.max_frame() as usize {
            return Err(Reason::FRAME_SIZE_ERROR);
        }
        if !self.receiving.has_settings {
            if head.kind != kind::SETTINGS || head.has(flag::ACK) {
                return Err(Reason::PROTOCOL_ERROR);
            }
            self.receiving.has_settings = true;
        }
        // Nothing comes between the frames of a header block (RFC 9113 section 6.10).
        match &self.receiving.block {
            Some(block) if head.kind != kind::CONTINUATION || head.stream != block.stream => {
                Err(Reason::PROTOCOL_ERROR)
            }
            None if head.kind == kind::CONTINUATION => Err(Reason::PROTOCOL_ERROR),
            _ => Ok(()),
        }
    }

    fn receive_frame(&mut self, head: Head, payload: &[u8]) -> Result<(), Reason> {
        match head.kind {
            kind::HEADERS => self.receive_headers(head, payload),
            kind::CONTINUATION => self.receive_continuation(head, payload),
            kind::PRIORITY => self.receive_priority(head),
            kind::RST_STREAM => self.receive_reset(head, payload),
            kind::SETTINGS => self.receive_settings(head, payload),
            // This end never enables push (RFC 9113 section 8.4).
            kind::PUSH_PROMISE => Err(Reason::PROTOCOL_ERROR),
            kind::PING => self.receive_ping(head, payload),
            kind::GOAWAY => self.receive_go_away(head, payload),
            kind::WINDOW_UPDATE => self.receive_window_update(head, payload),
            // RFC 9113 section 5.5.
            _ => Ok(()),
        }
    }

    /// Whether neither end has opened the stream (RFC 9113 section 5.1.1).
    fn is_idle(&self, id: u32) -> bool {
        let is_local = id.is_multiple_of(2) == self.config.is_server;
        let last = if is_local {
            self.last_local
        } else {
            self.last_remote
        };
        id > last
    }

    /// Resets a stream because of the peer's violation (RFC 9113 section 5.4.2).
    fn stream_error(&mut self, id: u32, reason: Reason) -> Result<(), Reason> {
        self.unsent.resets += 1;
        match self.store.find(id) {
            Some(key) => self.reset(key, reason, Initiator::Engine),
            None => self.put_reset((id, 0), reason),
        }
        self.count_error_reset()
    }

    /// A frame on a stream that is closed: late if this end reset the stream, otherwise an error (RFC 9113 section 5.1). This end
    /// remembers a limited number of its resets, so the error does not count as a violation.
    fn answer_closed_stream(&mut self, id: u32) {
        if !self.is_ignored(id) {
            self.unsent.resets += 1;
            self.put_reset((id, 0), Reason::STREAM_CLOSED);
        }
    }

    /// Whether frames of a stream without a state are ignored: this end has reset the stream, or its GOAWAY has not taken it
    /// (RFC 9113 section 6.8).
    fn is_ignored(&self, id: u32) -> bool {
        let is_remote = id.is_multiple_of(2) != self.config.is_server;
        let is_untaken = is_remote && self.last_accepted.is_some_and(|last| id > last);
        is_untaken || self.resets.contains(id)
    }

    // DATA (RFC 9113 section 6.1).

    fn receive_data_head(&mut self, head: Head, padding: Option<usize>) -> Result<(), Reason> {
        if head.stream == 0 || self.is_idle(head.stream) {
            return Err(Reason::PROTOCOL_ERROR);
        }
        let overhead = padding.map_or(0, |padding| padding + 1);
        // Padding as long as the payload is an error.
        let payload = head
            .length
            .checked_sub(overhead)
            .ok_or(Reason::PROTOCOL_ERROR)?;
        if !self.recv_window.take(head.length) {
            return Err(Reason::FLOW_CONTROL_ERROR);
        }
        let end_stream = head.has(flag::END_STREAM);
        let stream = self.check_data(head, payload)?;
        let reader = stream.and_then(|key| self.store.get(key));
        let has_reader = reader.is_some_and(|stream| !stream.is_unread);
        // The peer may have sent a window of small frames before it learns of a reset.
        if !has_reader && !self.resets.take(head.stream, payload) {
            self.charge(|limit| limit.charge_unread_data(payload))?;
        }
        if has_reader && (payload > 0 || end_stream) {
            self.receiving.empty_frames = 0;
        } else if payload == 0 {
            self.receiving.empty_frames += 1;
            if self.receiving.empty_frames > MAX_EMPTY_FRAMES {
                return Err(Reason::ENHANCE_YOUR_CALM);
            }
        }
        self.release_connection(overhead);
        if let Some(stream) = stream.and_then(|key| self.store.get(key)) {
            stream.recv_window.release(overhead);
        }
        self.receiving.data = Some(Data {
            stream,
            payload,
            padding: padding.unwrap_or(0),
            end_stream,
        });
        Ok(())
    }

    /// Returns the stream that takes the payload, if one does.
    fn check_data(&mut self, head: Head, payload: usize) -> Result<Option<Key>, Reason> {
        let Some(key) = self.store.find(head.stream) else {
            self.answer_closed_stream(head.stream);
            return Ok(None);
        };
        let Some(stream) = self.store.get(key) else {
            return Ok(None);
        };
        let violation = match stream.recv {
            Half::AwaitingHead => Some(Reason::PROTOCOL_ERROR),
            Half::Ended => Some(Reason::STREAM_CLOSED),
            Half::Open if !stream.recv_window.take(head.length) => Some(Reason::FLOW_CONTROL_ERROR),
            Half::Open if !stream.content.take(payload, head.has(flag::END_STREAM)) => {
                Some(Reason::PROTOCOL_ERROR)
            }
            Half::Open => None,
        };
        let Some(reason) = violation else {
            return Ok(Some(key));
        };
        self.stream_error(head.stream, reason)?;
        Ok(None)
    }

    /// Receives the part of a DATA frame that is there. Returns whether the frame is complete.
    fn receive_payload(&mut self, read: &mut BytesMut, buffer: (u64, usize)) -> bool {
        let Some(data) = &mut self.receiving.data else {
            return true;
        };
        let count = data.payload.min(read.len());
        data.payload -= count;
        if count > 0 {
            let stream = data.stream.and_then(|key| self.store.get(key));
            let reader = stream.filter(|stream| stream.error.is_none() && !stream.is_unread);
            if let Some(stream) = reader {
                stream.in_flight += count;
                stream.body.push(read, count, buffer);
                self.wakes.extend(stream.recv_waker.take());
            } else {
                read.advance(count);
                self.recv_window.release(count);
            }
        }
        if data.payload > 0 {
            return false;
        }
        let count = data.padding.min(read.len());
        data.padding -= count;
        read.advance(count);
        if data.padding > 0 {
            return false;
        }
        let data = *data;
        self.receiving.data = None;
        self.end_data(data);
        true
    }

    fn end_data(&mut self, data: Data) {
        let Some(key) = data.stream else { return };
        // A stream that was reset within the frame has lost a part of the payload, so it does not end in order.
        let Some(stream) = self.store.get(key).filter(|stream| stream.error.is_none()) else {
            return;
        };
        if data.end_stream {
            stream.recv = Half::Ended;
            self.wakes.extend(stream.recv_waker.take());
            self.settle(key);
        } else {
            // Padding was released without a reader.
            self.mark_update(key);
        }
    }

    /// Lists the stream's `WINDOW_UPDATE` if it is due.
    pub(super) fn mark_update(&mut self, key: Key) {
        let Some(stream) = self.store.get(key) else {
            return;
        };
        let is_due = stream.recv == Half::Open
            && stream.error.is_none()
            && !stream.is_unread
            && stream.recv_window.is_due();
        if is_due && !stream.has_update {
            stream.has_update = true;
            self.updates.push(key);
            self.has_work = true;
            if self.updates.len() > 64 + 2 * self.store.len() {
                let store = &mut self.store;
                self.updates.retain(|key| store.get(*key).is_some());
            }
        }
    }

    // Header blocks (RFC 9113 sections 6.2 and 6.10).

    fn receive_headers(&mut self, head: Head, payload: &[u8]) -> Result<(), Reason> {
        if head.stream == 0 {
            return Err(Reason::PROTOCOL_ERROR);
        }
        let fragment = frame::header_fragment(head, payload)?;
        let end_stream = head.has(flag::END_STREAM);
        if head.has(flag::END_HEADERS) {
            return self.receive_block((head.stream, end_stream), fragment);
        }
        self.receiving.block = Some(Block {
            stream: head.stream,
            end_stream,
            bytes: BytesMut::from(fragment),
            frames: 1,
        });
        Ok(())
    }

    fn receive_continuation(&mut self, head: Head, payload: &[u8]) -> Result<(), Reason> {
        let max_list = self.max_header_list();
        let block = self
            .receiving
            .block
            .as_mut()
            .ok_or(Reason::PROTOCOL_ERROR)?;
        block.frames += 1;
        // A peer may encode fields in more bytes than they have, but no sensible one does.
        if block.bytes.len() + payload.len() > max_list.saturating_mul(2)
            || block.frames > MIN_BLOCK_FRAMES + max_list / MIN_BLOCK_FRAME
        {
            return Err(Reason::ENHANCE_YOUR_CALM);
        }
        block.bytes.extend_from_slice(payload);
        if !head.has(flag::END_HEADERS) {
            return Ok(());
        }
        let block = self.receiving.block.take().ok_or(Reason::PROTOCOL_ERROR)?;
        self.receive_block((block.stream, block.end_stream), &block.bytes)
    }

    fn max_header_list(&self) -> usize {
        let max = self.config.settings.max_header_list_size;
        max.unwrap_or(DEFAULT_MAX_HEADER_LIST) as usize
    }

    fn receive_block(&mut self, (id, end_stream): (u32, bool), block: &[u8]) -> Result<(), Reason> {
        let mut fields = Collected::new(self.max_header_list());
        let mut count = 0;
        let decoded = self.decoder.decode(block, |field, size| {
            count += 1;
            fields.add(field, size);
        });
        self.charge(|limit| limit.charge_fields(count))?;
        let is_valid = match decoded {
            Ok(()) => true,
            Err(DecodeError::Malformed) => false,
            Err(DecodeError::Compression) => return Err(Reason::COMPRESSION_ERROR),
        };
        if let Some(key) = self.store.find(id) {
            if !is_valid {
                return self.stream_error(id, Reason::PROTOCOL_ERROR);
            }
            return self.receive_message(key, end_stream, fields);
        }
        if !self.is_idle(id) {
            return self.receive_late_block(id);
        }
        if !self.config.is_server || id.is_multiple_of(2) {
            return Err(Reason::PROTOCOL_ERROR);
        }
        self.last_remote = id;
        if let Some(limit) = &mut self.frame_limit {
            limit.earn_for_stream();
        }
        // Streams behind the number of the last GOAWAY are not processed (RFC 9113 section 6.8).
        if self.last_accepted.is_some_and(|last| id > last) {
            return Ok(());
        }
        let max = self.config.settings.max_concurrent_streams;
        if max.is_some_and(|max| self.open_remote >= max as usize) {
            // RFC 9113 section 5.1.2.
            return self.stream_error(id, Reason::REFUSED_STREAM);
        }
        if !is_valid {
            return self.stream_error(id, Reason::PROTOCOL_ERROR);
        }
        self.receive_request(id, end_stream, fields)
    }

    /// Receives a block on a stream that is closed, or that the peer opens although it has opened a higher one already. The
    /// latter is an error of the connection (RFC 9113 section 5.1.1), unless this end may have reset the stream and forgotten it.
    fn receive_late_block(&mut self, id: u32) -> Result<(), Reason> {
        let is_remote = id.is_multiple_of(2) != self.config.is_server;
        if is_remote && !self.is_ignored(id) && id > self.resets.highest_forgotten {
            return Err(Reason::PROTOCOL_ERROR);
        }
        self.answer_closed_stream(id);
        Ok(())
    }

    fn receive_request(&mut self, id: u32, end: bool, fields: Collected) -> Result<(), Reason> {
        let is_over_size = fields.is_over_size();
        let allows_protocol = self.config.settings.enable_connect_protocol == Some(1);
        let length = fields.content_length();
        let request = if is_over_size {
            None
        } else {
            Some(fields.into_request(allows_protocol))
        };
        let mut content = Content::Any;
        if let Some(Ok(request)) = &request
            && request.method() != Method::CONNECT
        {
            content = length.map_or(Content::Any, Content::Left);
        }
        if matches!(request, Some(Err(_))) || !content.take(0, end) {
            return self.stream_error(id, Reason::PROTOCOL_ERROR);
        }
        let (send, recv) = (
            SendWindow::new(self.peer.window),
            RecvWindow::new(self.stream_windows.initial),
        );
        let mut stream = Stream::new(id, false, send, recv);
        stream.recv = if end { Half::Ended } else { Half::Open };
        stream.content = content;
        stream.is_counted = true;
        stream.is_unaccepted = !is_over_size;
        stream.recv_window.resize(self.stream_windows.after(0));
        self.open_remote += 1;
        let key = self.store.insert(stream);
        match request {
            Some(Ok(request)) => {
                self.mark_update(key);
                self.accept.push_back((key, request));
                Ok(())
            }
            // RFC 9113 section 10.5.1.
            _ => self.refuse_large_head(key),
        }
    }

    /// Answers a head that is too large, and then resets the stream.
    fn refuse_large_head(&mut self, key: Key) -> Result<(), Reason> {
        let mut response = Response::new(());
        *response.status_mut() = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
        let (encoder, max_frame) = (&mut self.encoder, self.peer.max_frame);
        frame::put_block(&mut self.heads, (key.id, true), max_frame, |block| {
            message::put_response(encoder, &response, block);
        });
        if let Some(stream) = self.store.get(key) {
            (stream.send, stream.end_sent) = (Half::Ended, true);
        }
        // `REFUSED_STREAM` would invite the peer to repeat the request.
        self.reset(key, Reason::PROTOCOL_ERROR, Initiator::Engine);
        self.settle(key);
        // The answer is one that the peer causes, also if no reset follows because the request is complete.
        self.unsent.resets += 1;
        self.count_error_reset()
    }

    /// Receives a response, an interim response or trailers.
    fn receive_message(&mut self, key: Key, end: bool, fields: Collected) -> Result<(), Reason> {
        let max_size = self.max_header_list();
        let Some(stream) = self.store.get(key) else {
            return Ok(());
        };
        if stream.is_waiting {
            return Err(Reason::PROTOCOL_ERROR);
        }
        if stream.recv == Half::Ended {
            return self.stream_error(key.id, Reason::STREAM_CLOSED);
        }
        if fields.is_over_size() {
            return self.stream_error(key.id, Reason::PROTOCOL_ERROR);
        }
        let accepted = if stream.recv == Half::AwaitingHead {
            receive_response(stream, end, fields, max_size)
        } else {
            receive_trailers(stream, end, fields, max_size)
        };
        if let Err(reason) = accepted {
            return self.stream_error(key.id, reason);
        }
        self.wakes.extend(stream.recv_waker.take());
        self.settle(key);
        Ok(())
    }

    // The other frames.

    fn receive_priority(&mut self, head: Head) -> Result<(), Reason> {
        if head.stream == 0 {
            return Err(Reason::PROTOCOL_ERROR);
        }
        if head.length == 5 {
            return Ok(());
        }
        // RFC 9113 section 6.3. An idle stream cannot be reset.
        if self.is_idle(head.stream) {
            return Err(Reason::FRAME_SIZE_ERROR);
        }
        self.stream_error(head.stream, Reason::FRAME_SIZE_ERROR)
    }

    fn receive_reset(&mut self, head: Head, payload: &[u8]) -> Result<(), Reason> {
        let reason = Reason::from(frame::parse_u32(payload)?);
        if head.stream == 0 || self.is_idle(head.stream) {
            return Err(Reason::PROTOCOL_ERROR);
        }
        let key = self.store.find(head.stream);
        let Some(stream) = key.and_then(|key| self.store.get(key)) else {
            return Ok(());
        };
        stream.error = Some(Error::reset(reason, Initiator::Remote));
        self.queued -= stream.clear_send_queue();
        stream.wake_all(&mut self.wakes);
        if stream.is_unaccepted {
            // The request's place is kept, and its memory is not.
            let place = (self.accept).binary_search_by_key(&head.stream, |(key, _)| key.id);
            if let Some((_, request)) = place.ok().and_then(|place| self.accept.get_mut(place)) {
                *request = Request::new(());
            }
            self.unaccepted_resets += 1;
            if self.unaccepted_resets > self.config.max_unaccepted_resets {
                return Err(Reason::ENHANCE_YOUR_CALM);
            }
            self.charge(FrameLimit::charge_unaccepted_reset)?;
        }
        if let Some(key) = key {
            self.settle(key);
        }
        Ok(())
    }

    fn receive_settings(&mut self, head: Head, payload: &[u8]) -> Result<(), Reason> {
        if head.stream != 0 {
            return Err(Reason::PROTOCOL_ERROR);
        }
        if !head.has(flag::ACK) {
            return self.apply_peer_settings(&Settings::parse(payload)?);
        }
        if !payload.is_empty() {
            return Err(Reason::FRAME_SIZE_ERROR);
        }
        self.apply_local_settings()
    }

    fn receive_ping(&mut self, head: Head, payload: &[u8]) -> Result<(), Reason> {
        if head.stream != 0 {
            return Err(Reason::PROTOCOL_ERROR);
        }
        if payload.len() != 8 {
            return Err(Reason::FRAME_SIZE_ERROR);
        }
        if head.has(flag::ACK) {
            self.receive_pong(payload);
        } else {
            self.put_pong(payload);
        }
        Ok(())
    }

    fn receive_go_away(&mut self, head: Head, payload: &[u8]) -> Result<(), Reason> {
        if head.stream != 0 {
            return Err(Reason::PROTOCOL_ERROR);
        }
        let (last, reason, text) = frame::parse_go_away(payload)?;
        let text = Bytes::copy_from_slice(text);
        self.peer_leaves(last, Error::go_away(reason, Initiator::Remote, text));
        Ok(())
    }

    /// RFC 9113 section 6.9.
    fn receive_window_update(&mut self, head: Head, payload: &[u8]) -> Result<(), Reason> {
        let by = frame::parse_increment(payload)?;
        debug_assert!(by <= MAX_WINDOW);
        if head.stream == 0 {
            if by == 0 {
                return Err(Reason::PROTOCOL_ERROR);
            }
            if !self.send_window.change(i64::from(by)) {
                return Err(Reason::FLOW_CONTROL_ERROR);
            }
            (self.schedule).unblock(self.send_window.size(), &mut self.store);
            return Ok(());
        }
        if self.is_idle(head.stream) {
            return Err(Reason::PROTOCOL_ERROR);
        }
        let max_queued = self.max_queued();
        let key = self.store.find(head.stream);
        let Some((key, stream)) = key.and_then(|key| Some((key, self.store.get(key)?))) else {
            return Ok(());
        };
        if by == 0 {
            return self.stream_error(head.stream, Reason::PROTOCOL_ERROR);
        }
        // The window of a stream that sends no more does not follow the peer's SETTINGS, so it may differ from the peer's.
        if stream.end_sent {
            return Ok(());
        }
        if !stream.send_window.change(i64::from(by)) {
            return self.stream_error(head.stream, Reason::FLOW_CONTROL_ERROR);
        }
        stream.wake_sender(max_queued, &mut self.wakes);
        self.schedule.add(key, stream);
        Ok(())
    }
}

fn receive_response(
    stream: &mut Stream,
    end: bool,
    fields: Collected,
    max_size: usize,
) -> Result<(), Reason> {
    let (length, size) = (fields.content_length(), fields.size(max_size));
    let response = fields.into_response().map_err(|_| Reason::PROTOCOL_ERROR)?;
    stream.add_unread_fields(size);
    if response.status().is_informational() {
        if end || stream.interim.len() >= MAX_INTERIM || stream.fields_size > max_size {
            return Err(Reason::PROTOCOL_ERROR);
        }
        stream.interim.push_back(response);
        return Ok(());
    }
    stream.content = stream.content.of_response(response.status(), length);
    if !stream.content.take(0, end) {
        return Err(Reason::PROTOCOL_ERROR);
    }
    stream.response = Some(Box::new(response));
    stream.recv = if end { Half::Ended } else { Half::Open };
    Ok(())
}

fn receive_trailers(
    stream: &mut Stream,
    end: bool,
    fields: Collected,
    max_size: usize,
) -> Result<(), Reason> {
    if !end || !stream.content.take(0, true) {
        return Err(Reason::PROTOCOL_ERROR);
    }
    let size = fields.size(max_size);
    let trailers = fields.into_trailers().map_err(|_| Reason::PROTOCOL_ERROR)?;
    if !stream.is_unread {
        stream.add_unread_fields(size);
        stream.trailers = Some(Box::new(trailers));
    }
    stream.recv = Half::Ended;
    Ok(())
}
