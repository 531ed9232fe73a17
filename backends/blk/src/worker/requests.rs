//! Requests under way.

use super::virtqueue::Completion;
use crate::bits::Status;
use crate::paths::{PathId, PathSet};
use crate::per_node::steering::NumaSpan;
use farlane_block::engine::{Operation, Slot, Slots};
use farlane_zero_copy::View;
use farlane_zero_copy::slices::SliceList;
use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Instant;

/// Lists of slices that are kept for later requests.
const MAX_SPARE_LISTS: usize = 64;

/// A request whose parts are done by several nodes' workers, or over several paths. It is answered
/// with its last part.
#[derive(Debug)]
pub struct Whole {
    pub completion: Completion,
    /// The last error of a part, if there was one.
    pub status: Cell<Status>,
}

/// Whom the end of a request is told.
#[derive(Debug)]
pub enum Answer {
    /// The driver.
    Driver(Completion),
    /// The request that it is a part of.
    Whole(Rc<Whole>),
}

impl Answer {
    /// Keeps the guest's memory mapped.
    pub fn view(&self) -> &Rc<View> {
        match self {
            Self::Driver(completion) => completion.view(),
            Self::Whole(whole) => whole.completion.view(),
        }
    }
}

/// A failure on a path, and what has been tried since.
#[derive(Debug)]
pub struct Failure {
    /// The last error number.
    pub errno: i32,
    /// Paths on which it has failed in this round.
    pub tried: PathSet,
    /// Completed rounds.
    pub rounds: u8,
    /// It has waited for a path.
    pub has_waited: bool,
    /// When it failed first.
    pub since: Instant,
}

/// A request under way, or a part of one.
#[derive(Debug)]
pub struct Request {
    pub answer: Answer,
    /// The operation on a path.
    pub operation: Operation<Rc<View>, PathId>,
    /// The node that moves its data: its index.
    pub executing_node: usize,
    /// It is to be handed to that node's worker.
    pub is_remote: bool,
    /// The nodes of its data.
    pub span: NumaSpan,
    /// Its failures on paths, if any.
    pub failure: Option<Box<Failure>>,
    /// Up to where each path had been written when it began: of a sync.
    pub marks: Vec<u64>,
    /// Whether it is counted among those that are copied.
    pub is_copying: bool,
}

impl Request {
    /// A request of which nothing has been done.
    pub fn new(answer: Answer, operation: Operation<Rc<View>, PathId>, span: NumaSpan) -> Self {
        Self {
            answer,
            operation,
            executing_node: 0,
            is_remote: false,
            span,
            failure: None,
            marks: Vec::new(),
            is_copying: false,
        }
    }

    /// What has failed so far.
    pub fn failure(&mut self, errno: i32) -> &mut Failure {
        self.failure.get_or_insert_with(|| {
            Box::new(Failure {
                errno,
                tried: PathSet::EMPTY,
                rounds: 0,
                has_waited: false,
                since: Instant::now(),
            })
        })
    }
}

/// Requests under way, and what they wait for.
#[derive(Debug, Default)]
pub struct Requests {
    pub slots: Slots<Request>,
    /// Those that have a copy of their data.
    pub copying: usize,
    /// Those that wait for room for one.
    pub awaiting_copy: VecDeque<Slot>,
    /// Those that wait for syncs of others to end.
    pub unsettled: VecDeque<Slot>,
    /// Those that wait for a path.
    pub stranded: VecDeque<Slot>,
    /// Lists of former requests, to be used again.
    lists: Vec<SliceList>,
}

impl Requests {
    /// Storage for a list of slices.
    pub fn list(&mut self) -> SliceList {
        self.lists.pop().unwrap_or_default()
    }

    /// Takes it back.
    pub fn give_list(&mut self, list: SliceList) {
        if self.lists.len() < MAX_SPARE_LISTS {
            self.lists.push(list);
        }
    }
}
