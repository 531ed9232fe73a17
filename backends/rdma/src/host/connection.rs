//! One connection of a process: its context, and what it has asked for.

use super::admission::Admitted;
use super::events::ProcessEvents;
use super::open::{Answer, Open};
use super::packet::{Incoming, receive, send};
use super::sharing::{Job, Looked, Purpose};
use super::{HostState, Sender};
use farlane_abi::Errno;
use farlane_abi::config::ABI_VERSION;
use farlane_abi::control::{EVENT_WAKE, Reply};
use farlane_abi::ids::ContextId;
use farlane_daemon::{eventfd, warn_limited};
use farlane_guest_device::control::region_errno;
use farlane_guest_device::request::{HostRequest, Kind, parse_host};
use farlane_rdma_remoting::{BufferMapping, Party, Resource, Share};
use farlane_zero_copy::{Pool, Process};
use std::collections::HashMap;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Host memory that one process can have in buffers, in bytes.
const BUFFER_BYTES: u64 = 1 << 30;

/// What becomes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// The next request is awaited.
    Go,
    /// Its answer, and the next request, wait for what is looked at.
    Wait,
    /// The connection is closed.
    Close,
}

/// Where a process is let in.
pub(crate) struct Seat {
    /// Id of its context, whether it is open or not.
    pub id: ContextId,
    /// With whom it has what there is.
    pub party: Arc<Party>,
    /// By what it was let in, where its user is not the daemon's: its memory is not reached but
    /// where it shares it.
    pub another: Option<Admitted>,
    /// Descriptors of a connection.
    pub share: Share,
}

/// A connection of one process, and its context.
pub(crate) struct Connection {
    socket: OwnedFd,
    process: Arc<Process>,
    /// Or what it is told, whatever it asks, before it is closed.
    seat: Result<Seat, Errno>,
    open: Option<Open>,
    /// Descriptors that were sent and are closed with it.
    left: Vec<OwnedFd>,
    /// Its request waits for what is looked at.
    is_waiting: bool,
}

impl Connection {
    pub fn new(socket: OwnedFd, process: Arc<Process>, seat: Result<Seat, Errno>) -> Self {
        Self {
            socket,
            process,
            seat,
            open: None,
            left: Vec::new(),
            is_waiting: false,
        }
    }

    /// Whose descriptors it has: its process's or its user's, where it was let in.
    pub fn sender(&self) -> Sender {
        match &self.seat {
            Ok(seat) => match seat.another {
                None => Sender::Process(self.process.pid()),
                Some(by) => Sender::Other(by),
            },
            Err(_) => Sender::Stranger,
        }
    }

    /// Whether its request waits for what is looked at.
    pub fn is_waiting(&self) -> bool {
        self.is_waiting
    }

    /// The id of its process.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// What is watched of it: its socket and its process.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.socket.as_fd(), self.process.pidfd()]
    }

    /// Receives one request, and answers it, unless it has to wait. `number` is the connection's.
    pub fn serve(&mut self, host: &HostState, number: u64) -> Next {
        let (bytes, descriptors) = match receive(self.socket.as_fd()) {
            Incoming::Nothing => return Next::Go,
            Incoming::End => return Next::Close,
            Incoming::Packet { bytes, descriptors } => (bytes, descriptors),
        };
        let (result, next) = match &self.seat {
            Err(errno) => {
                self.left = descriptors;
                (Err(*errno), Next::Close)
            }
            Ok(seat) => {
                let id = seat.id;
                self.obey(host, (number, id), &bytes, descriptors)
            }
        };
        match result {
            Ok(None) => {
                self.is_waiting = true;
                Next::Wait
            }
            Ok(Some(answer)) => self.answer(host, Ok(answer), next),
            Err(errno) => self.answer(host, Err(errno), next),
        }
    }

    /// Goes on with a request whose files have been looked at.
    pub fn shared(&mut self, host: &HostState, looked: Looked) -> Next {
        self.is_waiting = false;
        let region = looked.region;
        let result = self.attach_shared(host, looked);
        if let Err(errno) = result {
            let pid = self.process.pid();
            warn_limited!(
                host.limit,
                "Host process {pid}: files of region {region:?}: {errno}"
            );
        }
        let answer = result.map(|()| Answer::default());
        self.answer(host, answer, Next::Go)
    }

    fn attach_shared(&mut self, host: &HostState, looked: Looked) -> Result<(), Errno> {
        let seat = self.seat.as_ref().map_err(|errno| *errno)?;
        let open = self.open.as_mut().ok_or(Errno::ENOENT)?;
        let Looked {
            region,
            purpose,
            memory,
            backings,
            ..
        } = looked;
        let attach = |open: &mut Open| {
            let memory = memory.map_err(|e| region_errno(&e))?;
            host.locate(&memory);
            match purpose {
                Purpose::Registration => open.context.attach_pin(region, memory)?,
                Purpose::Segment => open.attach_segment(&self.process, region, memory)?,
            }
            open.regions += 1;
            Ok(())
        };
        let made = attach(open);
        open.keep(host, region, backings, made)?;
        host.port.settle(seat.id)
    }

    /// Answers a request.
    fn answer(&self, host: &HostState, result: Result<Answer, Errno>, next: Next) -> Next {
        host.counters
            .count(result.as_ref().map(drop).map_err(|&e| e));
        let (status, answer) = match result {
            Ok(answer) => (0, answer),
            Err(errno) => (errno.to_wire(), Answer::default()),
        };
        let reply = Reply {
            status: status.into(),
            value: answer.value.into(),
            ..Reply::default()
        };
        let descriptor = answer.buffer.as_ref().map(BufferMapping::fd);
        match send(self.socket.as_fd(), &reply, descriptor) {
            Ok(()) => next,
            Err(_) => Next::Close,
        }
    }

    /// Carries out the request of a process that was let in.
    fn obey(
        &mut self,
        host: &HostState,
        number_and_id: (u64, ContextId),
        bytes: &[u8],
        descriptors: Vec<OwnedFd>,
    ) -> (Result<Option<Answer>, Errno>, Next) {
        let count = descriptors.len();
        let request = parse_host(bytes).and_then(|request| {
            let matching = count == request.descriptors();
            matching.then_some(request).ok_or(Errno::EPROTO)
        });
        // What is kept as a file is never closed here. To close memory may be to free all of it:
        // only who wants some has it closed here.
        let is_file = matches!(&request, Ok(HostRequest::Attach(new)) if new.kind == Kind::File);
        let is_memory = matches!(
            request,
            Ok(HostRequest::Attach(_) | HostRequest::Share { .. })
        );
        let at_once = |fd: &OwnedFd| match is_memory {
            _ if is_file => true,
            true => eventfd::closes_at_once(fd.as_fd()),
            false => eventfd::examine(fd.as_fd()).is_ok(),
        };
        let mut usable = Some(descriptors);
        if let Some(strange) = usable.take_if(|all| !all.iter().all(at_once)) {
            host.closing.close(self.sender(), strange, ());
        }
        let next = match &request {
            // What cannot even be read is not spoken with.
            Ok(HostRequest::Close) | Err(Errno::EPROTO) => Next::Close,
            _ => Next::Go,
        };
        let result = request.clone().and_then(|request| match usable {
            Some(descriptors) => self.execute(host, number_and_id, request, descriptors),
            // Neither memory nor an eventfd.
            None => Err(Errno::EINVAL),
        });
        if let Err(errno) = result {
            let malformed = |_| "a malformed request".to_owned();
            let what = request.map_or_else(malformed, |request| format!("{request:?}"));
            let pid = self.process.pid();
            warn_limited!(host.limit, "Host process {pid}: {what}: {errno}");
        }
        (result, next)
    }

    /// Ends the context. Returns its id, which is free, where it had one.
    pub fn close(mut self, host: &HostState) -> Option<ContextId> {
        let sender = self.sender();
        let id = self.seat.as_ref().ok().map(|seat| seat.id);
        if let Some(id) = id {
            self.end(host, id);
        }
        let mut descriptors = self.left;
        descriptors.push(self.socket);
        // With its party, which is there as long as something is taken of it.
        let held = self.seat.ok().map(|seat| (seat.share, seat.party));
        host.closing.close(sender, descriptors, held);
        id
    }

    fn end(&mut self, host: &HostState, id: ContextId) {
        let sender = self.sender();
        if let Some(open) = self.open.take() {
            let _ = host.port.close(id);
            let (files, shares): (_, Vec<_>) = open.files.into_values().unzip();
            host.closing.close(sender, files, shares);
            if !open.backings.is_empty() {
                host.closing.free(open.backings);
            }
            log::debug!("Host process {} has closed its context", self.process.pid());
        }
    }

    /// The answer; none where it waits for what is looked at.
    fn execute(
        &mut self,
        host: &HostState,
        (number, id): (u64, ContextId),
        request: HostRequest,
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<Option<Answer>, Errno> {
        match request {
            HostRequest::Ping => return Ok(Some(Answer::default())),
            HostRequest::Open { version } => {
                return self.open(host, id, version, descriptors).map(Some);
            }
            HostRequest::Close => {
                self.end(host, id);
                return Ok(Some(Answer::default()));
            }
            _ => {}
        }
        let sender = self.sender();
        let seat = self.seat.as_ref().map_err(|errno| *errno)?;
        let open = self.open.as_mut().ok_or(Errno::ENOENT)?;
        match request {
            HostRequest::Attach(new) if new.kind == Kind::File => {
                let file = descriptors.pop().ok_or(Errno::EPROTO)?;
                open.attach_file(host, seat, sender, new.region, file)?;
            }
            HostRequest::Attach(new) if new.kind == Kind::Segment && seat.another.is_some() => {
                let pieces = descriptors.into_iter().map(|file| (file, 0, new.length));
                let job = Job::new(number, new.region, Purpose::Segment, pieces, true);
                return open.look(host, seat, sender, job);
            }
            HostRequest::Attach(new) => {
                let process = Arc::clone(&self.process);
                let attach = |open: &mut Open, files: Vec<OwnedFd>| {
                    open.attach(host, seat, &process, &new, files.into_iter().next())
                };
                open.attach_with(host, seat, sender, new.region, descriptors, attach)?;
                host.port.settle(id)?;
            }
            HostRequest::Share { new, pieces } => {
                let Kind::Shared { writable } = new.kind else {
                    return Err(Errno::EINVAL);
                };
                let pieces = descriptors.into_iter().zip(pieces);
                let pieces = pieces.map(|(file, (offset, length))| (file, offset, length));
                let job = Job::new(number, new.region, Purpose::Registration, pieces, writable);
                return open.look(host, seat, sender, job);
            }
            HostRequest::Detach { region } => {
                open.context.detach(region)?;
                if let Some(backing) = open.backings.remove(&region) {
                    host.closing.free(backing);
                }
                if let Some((file, share)) = open.files.remove(&region) {
                    host.closing.close(sender, vec![file], share);
                }
                open.regions = open.regions.saturating_sub(1);
            }
            HostRequest::WindowMap(place) => {
                return open.map(place).map(|buffer| {
                    Some(Answer {
                        buffer: Some(buffer),
                        ..Answer::default()
                    })
                });
            }
            HostRequest::WindowUnmap(place) => open.unmap(place)?,
            HostRequest::BindEvent { index } => {
                let fd = descriptors.pop().ok_or(Errno::EPROTO)?;
                let fd = eventfd::check(fd).map_err(|_| Errno::EINVAL)?;
                let share = seat.party.take(Resource::Descriptors, 1);
                let share = share.ok_or(Errno::ENOMEM)?;
                open.events.bind(index, fd, Some(share));
            }
            HostRequest::UnbindEvent { index } => {
                if !open.events.unbind(index) {
                    return Err(Errno::ENOENT);
                }
            }
            HostRequest::Ping | HostRequest::Open { .. } | HostRequest::Close => {}
        }
        Ok(Some(Answer::default()))
    }

    fn open(
        &mut self,
        host: &HostState,
        id: ContextId,
        version: u32,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Answer, Errno> {
        let seat = self.seat.as_ref().map_err(|errno| *errno)?;
        if self.open.is_some() {
            return Err(Errno::EEXIST);
        }
        if version != ABI_VERSION {
            return Err(Errno::EPROTO);
        }
        let mut adopted = descriptors
            .into_iter()
            .map(|fd| eventfd::check(fd).map_err(|_| Errno::EINVAL));
        let (Some(wake), Some(bell)) = (adopted.next(), adopted.next()) else {
            return Err(Errno::EPROTO);
        };
        let (wake, bell) = (wake?, bell?);
        let events = Arc::new(ProcessEvents::default());
        events.bind(EVENT_WAKE, wake, None);
        let doorbell = host.server.add_doorbell(bell).map_err(|_| Errno::ENOMEM)?;
        let pool = Pool::separate_files(BUFFER_BYTES);
        let sink = Arc::clone(&events) as _;
        let context = host.port.open_for(&seat.party, id, sink, Some(pool))?;
        self.open = Some(Open {
            context,
            events,
            _doorbell: doorbell,
            backings: HashMap::new(),
            files: HashMap::new(),
            regions: 0,
            mappings: 0,
        });
        log::debug!("Host process {} has opened a context", self.process.pid());
        Ok(Answer {
            // Whom the process has to let into its memory, which is nobody of another user.
            value: match seat.another {
                None => std::process::id().into(),
                Some(_) => 0,
            },
            ..Answer::default()
        })
    }
}
