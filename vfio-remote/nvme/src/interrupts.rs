//! Interrupts on their way out: MSI-X vectors, or the pin.

use crate::counters::{Counters, count};
use farlane_pci::{AccessError, InterruptKind, Signal};
use farlane_sys::sync::lock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// One MSI-X vector.
#[derive(Debug, Default)]
struct Vector {
    signal: Mutex<Option<Arc<dyn Signal>>>,
    /// Raised while it went nowhere.
    pending: AtomicBool,
}

#[derive(Debug, Default)]
struct Pin {
    signal: Option<Arc<dyn Signal>>,
    /// By its user, or because it was raised.
    masked: bool,
}

/// All interrupts of a function.
#[derive(Debug)]
pub struct Interrupts {
    vectors: Vec<Vector>,
    /// Vectors that go somewhere: with any, the pin is silent.
    connected: AtomicUsize,
    pin: Mutex<Pin>,
    counters: Arc<Counters>,
}

impl Interrupts {
    /// So many MSI-X vectors, and the pin; all go nowhere.
    pub fn new(vectors: u16, counters: Arc<Counters>) -> Self {
        Self {
            vectors: (0..vectors).map(|_| Vector::default()).collect(),
            connected: AtomicUsize::new(0),
            pin: Mutex::default(),
            counters,
        }
    }

    /// Connects or disconnects one.
    pub fn set(
        &self,
        kind: InterruptKind,
        vector: u16,
        signal: Option<Arc<dyn Signal>>,
    ) -> Result<(), AccessError> {
        match kind {
            InterruptKind::Msix => {
                let slot = self
                    .vectors
                    .get(usize::from(vector))
                    .ok_or(AccessError::Interrupt { kind, vector })?;
                let mut current = lock(&slot.signal);
                match (current.is_some(), signal.is_some()) {
                    (false, true) => self.connected.fetch_add(1, Ordering::SeqCst),
                    (true, false) => self.connected.fetch_sub(1, Ordering::SeqCst),
                    _ => 0,
                };
                *current = signal;
                if let Some(signal) = &*current
                    && slot.pending.swap(false, Ordering::SeqCst)
                {
                    signal.raise();
                }
                Ok(())
            }
            InterruptKind::Intx if vector == 0 => {
                let mut pin = lock(&self.pin);
                pin.signal = signal;
                pin.masked = false;
                Ok(())
            }
            _ => Err(AccessError::Interrupt { kind, vector }),
        }
    }

    /// Masks or unmasks the pin.
    pub fn mask_pin(&self, masked: bool) {
        lock(&self.pin).masked = masked;
    }

    /// Whether interrupts go by the pin.
    pub fn by_pin(&self) -> bool {
        self.connected.load(Ordering::Relaxed) == 0
    }

    /// Raises a vector.
    pub fn raise(&self, vector: u16) {
        let Some(slot) = self.vectors.get(usize::from(vector)) else {
            return;
        };
        let signal = lock(&slot.signal);
        if let Some(signal) = &*signal {
            signal.raise();
            count(&self.counters.interrupts, 1);
        } else {
            slot.pending.store(true, Ordering::SeqCst);
        }
    }

    /// The pin's level is high: raises it unless it is masked, and masks it.
    pub fn assert_pin(&self) {
        let mut pin = lock(&self.pin);
        if pin.masked {
            return;
        }
        if let Some(signal) = &pin.signal {
            signal.raise();
            pin.masked = true;
            count(&self.counters.interrupts, 1);
        }
    }

    /// Forgets what was raised while it went nowhere.
    pub fn clear_pending(&self) {
        for vector in &self.vectors {
            vector.pending.store(false, Ordering::SeqCst);
        }
    }

    /// The pending bits, eight to a byte (PCI 3.0, 6.8.2.7).
    pub fn pending_bits(&self) -> Vec<u8> {
        let bit = |v: &Vector| u8::from(v.pending.load(Ordering::SeqCst));
        self.vectors
            .chunks(8)
            .map(|group| group.iter().rev().fold(0, |bits, v| bits << 1 | bit(v)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[derive(Debug, Default)]
    struct Raised(AtomicU32);

    impl Signal for Raised {
        fn raise(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn what_was_raised_without_a_listener_is_raised_when_there_is_one() {
        let interrupts = Interrupts::new(9, Arc::default());
        let raised = Arc::new(Raised::default());
        interrupts.raise(8);
        assert_eq!(interrupts.pending_bits(), [0, 1]);
        interrupts
            .set(InterruptKind::Msix, 8, Some(raised.clone()))
            .unwrap();
        assert_eq!(interrupts.pending_bits(), [0, 0]);
        interrupts.raise(8);
        interrupts.raise(9);
        assert_eq!(raised.0.load(Ordering::SeqCst), 2);
        assert!(!interrupts.by_pin());
        interrupts.set(InterruptKind::Msix, 8, None).unwrap();
        assert!(interrupts.by_pin());
        assert!(interrupts.set(InterruptKind::Msix, 9, None).is_err());
        assert!(interrupts.set(InterruptKind::Msi, 0, None).is_err());
    }

    #[test]
    fn the_pin_masks_itself() {
        let interrupts = Interrupts::new(1, Arc::default());
        let raised = Arc::new(Raised::default());
        interrupts
            .set(InterruptKind::Intx, 0, Some(raised.clone()))
            .unwrap();
        interrupts.assert_pin();
        interrupts.assert_pin();
        assert_eq!(raised.0.load(Ordering::SeqCst), 1);
        interrupts.mask_pin(false);
        interrupts.assert_pin();
        assert_eq!(raised.0.load(Ordering::SeqCst), 2);
    }
}
