//! Tasks that wait to open a stream, in turn.

use std::{
    collections::VecDeque,
    task::{Context, Waker},
};

/// Tasks that wait until they may open a stream. Each has a ticket, and its waker until it is woken.
#[derive(Debug, Default)]
pub(super) struct ReadyQueue {
    entries: VecDeque<(u64, Option<Waker>)>,
    next_ticket: u64,
}

impl ReadyQueue {
    /// Whether the caller may open one of `free` streams; otherwise its waker is stored, and `ticket` is its place. A caller that
    /// may is still in the queue, see [`ReadyQueue::leave`].
    pub(super) fn poll(&mut self, ticket: &mut Option<u64>, free: usize, cx: &Context<'_>) -> bool {
        let place = ticket.and_then(|ticket| self.place_of(ticket));
        if place.unwrap_or(self.entries.len()) < free {
            return true;
        }
        if let Some(place) = place {
            self.entries[place].1 = Some(cx.waker().clone());
            return false;
        }
        *ticket = Some(self.next_ticket);
        let entry = (self.next_ticket, Some(cx.waker().clone()));
        self.entries.push_back(entry);
        self.next_ticket += 1;
        false
    }

    fn place_of(&self, ticket: u64) -> Option<usize> {
        self.entries
            .binary_search_by_key(&ticket, |(ticket, _)| *ticket)
            .ok()
    }

    /// Removes a task, which may or may not open a stream. Returns the waker of the task that moves up to the last of `free`
    /// streams, so that a place that is not used is not lost.
    pub(super) fn leave(&mut self, ticket: u64, free: usize) -> Option<Waker> {
        let place = self.place_of(ticket)?;
        self.entries.remove(place);
        let (_, waker) = self.entries.get_mut(free.checked_sub(1)?)?;
        waker.take()
    }

    /// Whether no task waits.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Takes the wakers of the first `free` tasks.
    pub(super) fn wakers(&mut self, free: usize) -> impl Iterator<Item = Waker> {
        let first = self.entries.iter_mut().take(free);
        first.filter_map(|(_, waker)| waker.take())
    }

    /// Removes all tasks, and returns their wakers.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Waker> {
        self.entries.drain(..).filter_map(|(_, waker)| waker)
    }

    /// Frees the memory of an empty queue.
    pub(super) fn shrink(&mut self) {
        if self.is_empty() {
            self.entries = VecDeque::new();
        }
    }
}
