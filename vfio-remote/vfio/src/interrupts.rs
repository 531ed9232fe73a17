//! Interrupts of a function on their way to its user.
//!
//! The kernel signals eventfds of our own, which one thread waits for: a borrower that gives a
//! descriptor of its own could make the kernel's or the lender's threads wait for it.

use crate::kernel::{IrqAction, Kernel};
use farlane_pci::{AccessError, InterruptKind, InterruptVector, Signal};
use farlane_sys::eventfd;
use farlane_sys::sync::lock;
use farlane_sys::thread::OwnedThread;
use rustix::event::epoll;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Tells the thread to end.
const STOP: u64 = u64::MAX;

#[derive(Debug)]
struct Vector {
    event: Arc<OwnedFd>,
    signal: Arc<dyn Signal>,
}

#[derive(Debug, Default)]
struct State {
    /// What the user wants, by vector; each kind apart.
    intx: Option<Vector>,
    msi: BTreeMap<u16, Vector>,
    msix: BTreeMap<u16, Vector>,
    /// What the kernel has been told: the kind that is enabled, and with how many vectors.
    enabled: Option<(InterruptKind, u16)>,
    intx_masked: bool,
}

#[derive(Debug)]
struct Shared {
    epoll: OwnedFd,
    stop: OwnedFd,
    state: Mutex<State>,
    raised: Arc<AtomicU64>,
}

/// The interrupts of one use of a function.
#[derive(Debug)]
pub(crate) struct InterruptRouter {
    kernel: Arc<dyn Kernel>,
    shared: Arc<Shared>,
    _thread: OwnedThread,
}

fn code(kind: InterruptKind) -> u64 {
    match kind {
        InterruptKind::Intx => 0,
        InterruptKind::Msi => 1,
        InterruptKind::Msix => 2,
    }
}

/// What `epoll` tells of an eventfd.
fn key(vector: InterruptVector) -> u64 {
    code(vector.kind()) << 16 | u64::from(vector.number())
}

/// The vector with this key.
fn vector_of(key: u64) -> Option<InterruptVector> {
    let kind = InterruptKind::ALL
        .into_iter()
        .find(|&k| code(k) == key >> 16)?;
    InterruptVector::new(kind, u16::try_from(key & 0xffff).ok()?)
}

impl State {
    fn insert(&mut self, vector: InterruptVector, new: Vector) {
        match vector {
            InterruptVector::Intx => self.intx = Some(new),
            InterruptVector::Msi(number) => drop(self.msi.insert(number, new)),
            InterruptVector::Msix(number) => drop(self.msix.insert(number, new)),
        }
    }

    fn remove(&mut self, vector: InterruptVector) -> Option<Vector> {
        match vector {
            InterruptVector::Intx => self.intx.take(),
            InterruptVector::Msi(number) => self.msi.remove(&number),
            InterruptVector::Msix(number) => self.msix.remove(&number),
        }
    }

    fn get(&self, vector: InterruptVector) -> Option<&Vector> {
        match vector {
            InterruptVector::Intx => self.intx.as_ref(),
            InterruptVector::Msi(number) => self.msi.get(&number),
            InterruptVector::Msix(number) => self.msix.get(&number),
        }
    }

    fn get_mut(&mut self, vector: InterruptVector) -> Option<&mut Vector> {
        match vector {
            InterruptVector::Intx => self.intx.as_mut(),
            InterruptVector::Msi(number) => self.msi.get_mut(&number),
            InterruptVector::Msix(number) => self.msix.get_mut(&number),
        }
    }

    /// A function uses one kind at a time (PCI 3.0, 6.8.2): the last that its user has turned to,
    /// where INTx may stay set up all the while.
    fn wanted(&self) -> Option<InterruptKind> {
        if !self.msix.is_empty() {
            Some(InterruptKind::Msix)
        } else if !self.msi.is_empty() {
            Some(InterruptKind::Msi)
        } else {
            self.intx.as_ref().map(|_| InterruptKind::Intx)
        }
    }

    /// How many vectors a kind is enabled with.
    fn size(&self, kernel: &dyn Kernel, kind: InterruptKind) -> u16 {
        let all = kernel.vectors(kind);
        match kind {
            // All at once: enabling one more later could lose an interrupt of another.
            InterruptKind::Msix | InterruptKind::Intx => all,
            // The function numbers its messages by how many are enabled (PCI 3.0, 6.8.1.3).
            InterruptKind::Msi => {
                let last = self.msi.last_key_value().map_or(0, |(&vector, _)| vector);
                (last + 1).next_power_of_two().min(all)
            }
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn forward(&self) {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                None,
            ) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => {
                    log::error!("Interrupts cannot be waited for: {e}");
                    return;
                }
            }
            let state = self.state();
            for event in &events {
                let data = event.data.u64();
                if data == STOP {
                    return;
                }
                let Some(found) = vector_of(data).and_then(|vector| state.get(vector)) else {
                    continue;
                };
                let mut count = [0; 8];
                if rustix::io::read(&*found.event, &mut count) == Ok(8) {
                    self.raised
                        .fetch_add(u64::from_ne_bytes(count), Ordering::Relaxed);
                    found.signal.raise();
                }
            }
        }
    }
}

impl InterruptRouter {
    /// Starts a thread, which counts in `raised`.
    pub fn start(kernel: Arc<dyn Kernel>, raised: Arc<AtomicU64>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let stop = eventfd::new()?;
        epoll::add(
            &epoll,
            &stop,
            epoll::EventData::new_u64(STOP),
            epoll::EventFlags::IN,
        )?;
        let shared = Arc::new(Shared {
            epoll,
            stop,
            state: Mutex::default(),
            raised,
        });
        let thread = OwnedThread::spawn("vfio-irq", {
            let shared = Arc::clone(&shared);
            move || shared.forward()
        })?;
        Ok(Self {
            kernel,
            shared,
            _thread: thread,
        })
    }

    pub fn set(
        &self,
        vector: InterruptVector,
        signal: Option<Arc<dyn Signal>>,
    ) -> Result<(), AccessError> {
        if vector.number() >= self.kernel.vectors(vector.kind()) {
            return Err(AccessError::Interrupt(vector));
        }
        let mut state = self.shared.state();
        match signal {
            Some(signal) => {
                if let Some(known) = state.get_mut(vector) {
                    known.signal = signal;
                    return Ok(());
                }
                let event = Arc::new(eventfd::new().map_err(io::Error::from)?);
                epoll::add(
                    &self.shared.epoll,
                    &*event,
                    epoll::EventData::new_u64(key(vector)),
                    epoll::EventFlags::IN,
                )
                .map_err(io::Error::from)?;
                state.insert(vector, Vector { event, signal });
                let told = self.tell(&mut state, vector);
                if told.is_err() {
                    // The descriptor leaves the set as it is closed.
                    state.remove(vector);
                    if let Err(e) = self.tell(&mut state, vector) {
                        log::error!("Interrupts are as they were no more: {e}");
                    }
                }
                told
            }
            None => {
                let Some(gone) = state.remove(vector) else {
                    return Ok(());
                };
                self.tell(&mut state, vector)?;
                drop(gone);
                Ok(())
            }
        }
    }

    /// Has the kernel know what is wanted after `changed` has.
    fn tell(&self, state: &mut State, changed: InterruptVector) -> Result<(), AccessError> {
        let kernel = &*self.kernel;
        let wanted = state.wanted().map(|kind| (kind, state.size(kernel, kind)));
        let fits = match (state.enabled, wanted) {
            (Some((enabled, size)), Some((kind, needed))) => enabled == kind && needed <= size,
            (None, None) => true,
            _ => false,
        };
        if !fits {
            if let Some((kind, _)) = state.enabled.take() {
                kernel.set_irqs(kind, 0, IrqAction::Disable)?;
            }
            return match wanted {
                Some((kind, size)) => self.enable(state, kind, size),
                None => Ok(()),
            };
        }
        match state.enabled {
            Some((kind, _)) if kind == changed.kind() => {
                let event = state.get(changed).map(|v| v.event.as_fd());
                kernel.set_irqs(kind, changed.number(), IrqAction::Send(&[event]))?;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn enable(&self, state: &mut State, kind: InterruptKind, size: u16) -> Result<(), AccessError> {
        let event = |number| {
            let vector = state.get(InterruptVector::new(kind, number)?)?;
            Some(vector.event.as_fd())
        };
        let events: Vec<_> = (0..size).map(event).collect();
        let fewer = self.kernel.set_irqs(kind, 0, IrqAction::Send(&events))?;
        if let Some(possible) = fewer {
            let why = format!("the host has {possible} of {size} {kind:?} vectors");
            return Err(io::Error::other(why).into());
        }
        state.enabled = Some((kind, size));
        if kind == InterruptKind::Intx && state.intx_masked {
            self.kernel.set_irqs(kind, 0, IrqAction::Mask)?;
        }
        Ok(())
    }

    pub fn mask_intx(&self, masked: bool) -> Result<(), AccessError> {
        let kind = InterruptKind::Intx;
        if self.kernel.vectors(kind) == 0 {
            return Err(AccessError::Interrupt(InterruptVector::Intx));
        }
        let mut state = self.shared.state();
        state.intx_masked = masked;
        if matches!(state.enabled, Some((InterruptKind::Intx, _))) {
            let action = if masked {
                IrqAction::Mask
            } else {
                IrqAction::Unmask
            };
            self.kernel.set_irqs(kind, 0, action)?;
        }
        Ok(())
    }
}

impl Drop for InterruptRouter {
    fn drop(&mut self) {
        let enabled = self.shared.state().enabled.take();
        if let Some((kind, _)) = enabled
            && let Err(e) = self.kernel.set_irqs(kind, 0, IrqAction::Disable)
        {
            log::error!("Cannot disable {kind:?}: {e}");
        }
        while rustix::io::write(&self.shared.stop, &1_u64.to_ne_bytes()) == Err(Errno::INTR) {}
    }
}
