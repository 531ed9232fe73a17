//! Interrupts on their way out: MSI-X vectors, or the pin.

use crate::{AccessError, InterruptVector, Interrupts, Signal};
use farlane_sys::sync::lock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
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

/// The interrupts of a function.
#[derive(Debug)]
pub struct InterruptLines<C> {
    vectors: Vec<Vector>,
    /// Vectors that go somewhere: with any, the pin is silent.
    connected: AtomicUsize,
    /// None where the function has none.
    pin: Option<Mutex<Pin>>,
    counters: Arc<C>,
    /// What counts interrupts raised.
    raised: fn(&C) -> &AtomicU64,
}

impl<C> InterruptLines<C> {
    /// Those that `count` names; all go nowhere. `raised` of the counters counts them.
    #[must_use]
    pub fn new(count: Interrupts, counters: Arc<C>, raised: fn(&C) -> &AtomicU64) -> Self {
        Self {
            vectors: (0..count.msix).map(|_| Vector::default()).collect(),
            connected: AtomicUsize::new(0),
            pin: (count.intx > 0).then(Mutex::default),
            counters,
            raised,
        }
    }

    fn signal(&self, signal: &dyn Signal) {
        signal.raise();
        (self.raised)(&self.counters).fetch_add(1, Ordering::Relaxed);
    }

    fn pin(&self) -> Result<&Mutex<Pin>, AccessError> {
        let missing = AccessError::Interrupt(InterruptVector::Intx);
        self.pin.as_ref().ok_or(missing)
    }

    /// Connects or disconnects one.
    ///
    /// # Errors
    /// There is none such.
    pub fn set(
        &self,
        vector: InterruptVector,
        signal: Option<Arc<dyn Signal>>,
    ) -> Result<(), AccessError> {
        match vector {
            InterruptVector::Msix(number) => {
                let slot = self
                    .vectors
                    .get(usize::from(number))
                    .ok_or(AccessError::Interrupt(vector))?;
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
                    self.signal(&**signal);
                }
                Ok(())
            }
            InterruptVector::Intx => {
                let mut pin = lock(self.pin()?);
                pin.signal = signal;
                pin.masked = false;
                Ok(())
            }
            InterruptVector::Msi(_) => Err(AccessError::Interrupt(vector)),
        }
    }

    /// Masks or unmasks the pin.
    ///
    /// # Errors
    /// There is none.
    pub fn mask_pin(&self, masked: bool) -> Result<(), AccessError> {
        lock(self.pin()?).masked = masked;
        Ok(())
    }

    /// Whether interrupts go by the pin.
    #[must_use]
    pub fn by_pin(&self) -> bool {
        self.connected.load(Ordering::Relaxed) == 0
    }

    /// Raises an MSI-X vector, by its number.
    pub fn raise(&self, vector: u16) {
        let Some(slot) = self.vectors.get(usize::from(vector)) else {
            return;
        };
        let signal = lock(&slot.signal);
        if let Some(signal) = &*signal {
            self.signal(&**signal);
        } else {
            slot.pending.store(true, Ordering::SeqCst);
        }
    }

    /// The pin's level is high: raises it unless it is masked, and masks it.
    pub fn assert_pin(&self) {
        let Some(pin) = &self.pin else {
            return;
        };
        let mut pin = lock(pin);
        if !pin.masked
            && let Some(signal) = &pin.signal
        {
            self.signal(&**signal);
            pin.masked = true;
        }
    }

    /// Forgets what was raised while it went nowhere.
    pub fn clear_pending(&self) {
        for vector in &self.vectors {
            vector.pending.store(false, Ordering::SeqCst);
        }
    }

    /// The pending bits, eight to a byte (PCI 3.0, 6.8.2.7).
    #[must_use]
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

    fn lines(msix: u16, intx: u16) -> InterruptLines<AtomicU64> {
        let count = Interrupts { intx, msi: 0, msix };
        InterruptLines::new(count, Arc::default(), |counter| counter)
    }

    #[test]
    fn what_was_raised_without_a_listener_is_raised_when_there_is_one() {
        let interrupts = lines(9, 1);
        let raised = Arc::new(Raised::default());
        interrupts.raise(8);
        assert_eq!(interrupts.pending_bits(), [0, 1]);
        interrupts
            .set(InterruptVector::Msix(8), Some(raised.clone()))
            .unwrap();
        assert_eq!(interrupts.pending_bits(), [0, 0]);
        interrupts.raise(8);
        interrupts.raise(9);
        assert_eq!(raised.0.load(Ordering::SeqCst), 2);
        assert!(!interrupts.by_pin());
        interrupts.set(InterruptVector::Msix(8), None).unwrap();
        assert!(interrupts.by_pin());
        assert!(interrupts.set(InterruptVector::Msix(9), None).is_err());
        assert!(interrupts.set(InterruptVector::Msi(0), None).is_err());
    }

    #[test]
    fn the_pin_masks_itself() {
        let interrupts = lines(1, 1);
        let raised = Arc::new(Raised::default());
        interrupts
            .set(InterruptVector::Intx, Some(raised.clone()))
            .unwrap();
        interrupts.assert_pin();
        interrupts.assert_pin();
        assert_eq!(raised.0.load(Ordering::SeqCst), 1);
        interrupts.mask_pin(false).unwrap();
        interrupts.assert_pin();
        assert_eq!(raised.0.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_function_without_a_pin_has_no_intx() {
        let interrupts = lines(2, 0);
        assert!(interrupts.set(InterruptVector::Intx, None).is_err());
        assert!(interrupts.mask_pin(true).is_err());
        interrupts.raise(0);
        interrupts.clear_pending();
        assert_eq!(interrupts.pending_bits(), [0]);
    }
}
