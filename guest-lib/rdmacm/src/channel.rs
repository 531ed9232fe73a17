//! Event channels: an eventfd with a token for each event that has come.
//!
//! Events of ids come from the backend of their device, which raises the eventfd itself; those that
//! this library makes wait here, and raise it, too. So a program may poll it: whoever takes an
//! event away that the program is not told of takes its token, too.

use crate::device::Device;
use crate::errno::{called, pointer};
use crate::id::{self, Address};
use crate::sys::{rdma_cm_event_type, rdma_cm_id, rdma_event_channel};
use farlane_abi::Errno;
use farlane_rdma_client::EventBinding;
use farlane_sys::sync::lock;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use std::collections::VecDeque;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// An event that this library has made.
#[derive(Clone, Copy)]
pub struct Local {
    pub id: Address,
    pub kind: rdma_cm_event_type,
    pub status: i32,
    /// Of a multicast group that was joined: its number among those of the id.
    pub group: Option<u64>,
}

/// A device whose events come here.
pub struct Bound {
    pub device: Arc<Device>,
    pub binding: EventBinding,
    /// It is gone, and the program has been told.
    pub is_gone: bool,
}

/// An event channel, with the state of this library behind it.
#[repr(C)]
pub struct Channel {
    c: rdma_event_channel,
    events: OwnedFd,
    /// Held while a token and its event are taken.
    turn: Mutex<()>,
    local: Mutex<VecDeque<Local>>,
    bound: Mutex<Vec<Bound>>,
    is_destroyed: AtomicBool,
}

/// What came of waiting for a token.
#[derive(Debug, PartialEq, Eq)]
enum Waited<T> {
    Token(Option<T>),
    Destroyed,
}

/// The state behind an event channel.
pub unsafe fn of<'a>(channel: *mut rdma_event_channel) -> &'a Channel {
    // SAFETY: by the caller's contract this library has made it.
    unsafe { &*channel.cast::<Channel>() }
}

/// `rdma_create_event_channel`.
pub fn create() -> *mut rdma_event_channel {
    pointer(make())
}

/// Makes an event channel.
pub fn make() -> Result<*mut rdma_event_channel, Errno> {
    if crate::device::all().is_empty() {
        return Err(Errno::ENODEV);
    }
    let channel = Arc::into_raw(Arc::new(Channel::new()?));
    Ok(channel.cast_mut().cast())
}

/// The same, which lasts for whoever waits for its events although another thread destroys it:
/// programs leave a thread in `rdma_get_cm_event` when they end.
pub unsafe fn held(channel: *mut rdma_event_channel) -> Arc<Channel> {
    let channel = channel.cast::<Channel>().cast_const();
    // SAFETY: by the caller's contract `make` has made it, and it is not destroyed yet.
    unsafe {
        Arc::increment_strong_count(channel);
        Arc::from_raw(channel)
    }
}

/// `rdma_destroy_event_channel`.
pub unsafe fn destroy(channel: *mut rdma_event_channel) {
    if channel.is_null() {
        return;
    }
    // SAFETY: it is what `make` has leaked; nobody begins to use it any more.
    let channel = unsafe { Arc::from_raw(channel.cast::<Channel>().cast_const()) };
    channel.end();
}

impl Channel {
    fn new() -> Result<Self, Errno> {
        let events = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE);
        let events = events.map_err(|e| crate::errno::number(e.raw_os_error()))?;
        Ok(Self {
            c: rdma_event_channel {
                fd: events.as_raw_fd(),
            },
            events,
            turn: Mutex::default(),
            local: Mutex::default(),
            bound: Mutex::default(),
            is_destroyed: AtomicBool::new(false),
        })
    }

    /// The program has destroyed it: no event comes any more.
    fn end(&self) {
        {
            let _turn = lock(&self.turn);
            self.is_destroyed.store(true, Ordering::Relaxed);
        }
        let bound = std::mem::take(&mut *lock(&self.bound));
        drop(bound);
    }

    /// The event index by which events of a device come here.
    pub fn index(&self, device: &Arc<Device>) -> Result<u32, Errno> {
        let mut bound = lock(&self.bound);
        if let Some(bound) = bound
            .iter()
            .find(|bound| Arc::ptr_eq(&bound.device, device))
        {
            return Ok(bound.binding.index());
        }
        let binding = called(EventBinding::new(device.context(), self.events.as_fd()))?;
        let index = binding.index();
        bound.push(Bound {
            device: Arc::clone(device),
            binding,
            is_gone: false,
        });
        Ok(index)
    }

    /// Tells of an event.
    pub fn tell(&self, event: Local) {
        lock(&self.local).push_back(event);
        self.raise(1);
    }

    fn raise(&self, count: u64) {
        // It holds more than there can ever be.
        let _ = rustix::io::write(&self.events, &count.to_ne_bytes());
    }

    /// Takes the events of an id that wait here. Their tokens stay.
    pub fn take_those_of(&self, id: *mut rdma_cm_id) -> Vec<Local> {
        self.take_local(|event| event.id == Address(id))
    }

    fn take_local(&self, mut is_one: impl FnMut(&Local) -> bool) -> Vec<Local> {
        let mut local = lock(&self.local);
        let (taken, others): (VecDeque<_>, _) = local.drain(..).partition(|event| is_one(event));
        *local = others;
        taken.into()
    }

    /// Takes events away that nobody is told of: `remove` does, and says how many they are.
    pub fn take_away<R>(&self, remove: impl FnOnce() -> (R, usize)) -> R {
        let _turn = lock(&self.turn);
        let (result, count) = remove();
        // One that is still on its way, where the backend has not raised it yet, is not waited for.
        for _ in 0..count {
            if !self.take_token() {
                break;
            }
        }
        result
    }

    /// A multicast group that was left is not told of.
    pub fn forget_group(&self, id: *mut rdma_cm_id, group: u64) {
        let is_its = |event: &Local| event.id == Address(id) && event.group == Some(group);
        self.take_away(|| ((), self.take_local(is_its).len()));
    }

    /// Takes a token, where there is one. Others do so only in their turns.
    fn take_token(&self) -> bool {
        self.poll(Some(&Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        }))
        .is_ok_and(|is_there| is_there)
            && rustix::io::read(&self.events, &mut [0; 8]).is_ok()
    }

    fn poll(&self, timeout: Option<&Timespec>) -> Result<bool, Errno> {
        let mut all = [PollFd::new(&self.events, PollFlags::IN)];
        match poll(&mut all, timeout) {
            Ok(count) => Ok(count > 0),
            Err(e) => Err(crate::errno::number(e.raw_os_error())),
        }
    }

    /// Waits for a token, unless the program has made its descriptor one that does not, and has
    /// `take` take what comes of it. Where the channel is destroyed meanwhile it goes on to wait,
    /// as a read of the kernel's does.
    pub fn wait<T>(&self, take: impl FnOnce() -> Option<T>) -> Result<Option<T>, Errno> {
        match self.token(take)? {
            Waited::Token(taken) => Ok(taken),
            Waited::Destroyed => loop {
                std::thread::park();
            },
        }
    }

    fn token<T>(&self, take: impl FnOnce() -> Option<T>) -> Result<Waited<T>, Errno> {
        let number = |e: rustix::io::Errno| crate::errno::number(e.raw_os_error());
        loop {
            let is_destroyed = {
                let _turn = lock(&self.turn);
                let is_destroyed = self.is_destroyed.load(Ordering::Relaxed);
                if !is_destroyed && self.take_token() {
                    return Ok(Waited::Token(take()));
                }
                is_destroyed
            };
            let flags = fcntl_getfl(&self.events).map_err(number)?;
            if flags.contains(OFlags::NONBLOCK) {
                return Err(Errno::EAGAIN);
            }
            if is_destroyed {
                return Ok(Waited::Destroyed);
            }
            self.poll(None)?;
        }
    }

    /// The next event that this library has made. Its id has counted it: whoever destroys the id
    /// finds it here, or waits until it is acknowledged.
    pub fn next_local(&self) -> Option<Local> {
        let mut local = lock(&self.local);
        let next = local.pop_front()?;
        // SAFETY: an id takes its events out, which takes this lock, before it is destroyed.
        unsafe { id::of(next.id.0) }.hand_out();
        Some(next)
    }

    /// Goes through the devices whose events come here, until `what` has something.
    pub fn find<T>(&self, mut what: impl FnMut(&mut Bound) -> Option<T>) -> Option<T> {
        lock(&self.bound).iter_mut().find_map(&mut what)
    }
}

/// That of an id, which has one.
pub unsafe fn of_id<'a>(id: *mut rdma_cm_id) -> Result<&'a Channel, Errno> {
    // SAFETY: by the caller's contract.
    let channel = unsafe { (*id).channel };
    if channel.is_null() {
        return Err(Errno::EINVAL);
    }
    // SAFETY: as above.
    Ok(unsafe { of(channel) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::{RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_PS_TCP};
    use farlane_verbs_sys::IBV_QPT_RC;
    use std::ptr::null_mut;
    use std::sync::mpsc;
    use std::thread;

    #[test]
    fn an_id_whose_event_is_taken_is_not_destroyed_before_that_is_acknowledged() {
        let channel = Channel::new().unwrap();
        let c = (&raw const channel).cast_mut().cast::<rdma_event_channel>();
        let made = id::make(c, null_mut(), RDMA_PS_TCP, IBV_QPT_RC).unwrap();
        channel.tell(Local {
            id: Address(made),
            kind: RDMA_CM_EVENT_ADDR_RESOLVED,
            status: 0,
            group: None,
        });
        let event = channel.next_local().unwrap();
        // SAFETY: the id is there, as this shows.
        let taken = unsafe { id::of(event.id.0) };
        assert_eq!(taken.unacknowledged(), 1);
        let address = event.id;
        let (ended, end) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(move || {
                let Address(id) = { address };
                // SAFETY: nobody else destroys it.
                unsafe { id::destroy(id) };
                ended.send(()).unwrap();
            });
            assert_eq!(end.try_recv(), Err(mpsc::TryRecvError::Empty));
            taken.acknowledge();
            end.recv().unwrap();
        });
        assert!(channel.next_local().is_none());
    }

    #[test]
    fn who_waits_at_a_channel_that_is_destroyed_is_told_nothing() {
        let c = Arc::into_raw(Arc::new(Channel::new().unwrap())).cast_mut();
        // SAFETY: it was made so just now.
        let channel = unsafe { held(c.cast()) };
        let (begun, has_begun) = mpsc::channel();
        let waiter = thread::spawn(move || {
            begun.send(()).unwrap();
            channel.token(|| Some(()))
        });
        has_begun.recv().unwrap();
        // It is woken for an event that is taken away, and looks again when the channel has gone.
        // SAFETY: it is not destroyed before.
        let channel = unsafe { of(c.cast()) };
        channel.take_away(|| {
            channel.raise(1);
            ((), 1)
        });
        // SAFETY: the waiter has its own hold of it.
        unsafe {
            let waits = held(c.cast());
            destroy(c.cast());
            waits.raise(1);
        }
        assert_eq!(waiter.join().unwrap(), Ok(Waited::Destroyed));
    }

    #[test]
    fn events_that_nobody_is_told_of_leave_no_token() {
        let channel = Channel::new().unwrap();
        let c = (&raw const channel).cast_mut().cast::<rdma_event_channel>();
        let make = || id::make(c, null_mut(), RDMA_PS_TCP, IBV_QPT_RC).unwrap();
        let [gone, other] = [make(), make()];
        let tell = |id, group| {
            channel.tell(Local {
                id: Address(id),
                kind: RDMA_CM_EVENT_ADDR_RESOLVED,
                status: 0,
                group,
            });
        };
        let none = Some(&Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        });
        tell(gone, None);
        tell(gone, None);
        // SAFETY: nobody else destroys it.
        unsafe { id::destroy(gone) };
        assert_eq!(channel.poll(none), Ok(false));
        for group in [1, 2, 3] {
            tell(other, Some(group));
        }
        channel.forget_group(other, 2);
        for group in [1, 3] {
            let event = channel.wait(|| channel.next_local()).unwrap().unwrap();
            assert_eq!(event.group, Some(group));
            // SAFETY: it is not destroyed yet.
            unsafe { id::of(other) }.acknowledge();
        }
        assert_eq!(channel.poll(none), Ok(false));
        // SAFETY: nobody else destroys it.
        unsafe { id::destroy(other) };
    }
}
