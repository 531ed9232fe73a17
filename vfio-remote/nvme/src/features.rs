//! Features (NVMe 1.4, 5.21) and events (5.2).

use crate::bits::{Status, feature, high, low};
use crate::cmds::Select;
use crate::identify::MAX_EVENT_REQUESTS;
use crate::ids::NamespaceId;
use std::collections::{HashMap, VecDeque};
use std::time::Instant;

/// Milliseconds in a timestamp (figure 330): 48 bits.
const TIMESTAMP_MASK: u64 = (1 << 48) - 1;

/// What has a value of 32 bits and does nothing here but being kept: (feature, default, whether
/// it can be changed).
const KEPT: [(u8, u32, bool); 6] = [
    (feature::ARBITRATION, 0, true),
    (feature::ERROR_RECOVERY, 0, true),
    (feature::INTERRUPT_COALESCING, 0, true),
    (feature::WRITE_ATOMICITY, 0, true),
    (feature::ASYNC_EVENTS, 0, true),
    (feature::POWER_MANAGEMENT, 0, true),
];
/// Kelvin, over which there is a warning.
const TEMPERATURE_THRESHOLD: u32 = 343;

/// Deallocated or Unwritten Logical Block Error Enable, of Error Recovery (5.21.1.5).
const UNWRITTEN_BLOCK_ERROR: u32 = 1 << 16;
/// The composite temperature (5.21.1.4), which is all there is, and the place of the sensor in a
/// value; 15 is all of them.
const SENSOR: u32 = 0xf << 16;

/// What a value of a feature is in force for (figure 272).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    Controller,
    Namespace,
}

impl Scope {
    fn of(feature: u8) -> Self {
        match feature {
            feature::ERROR_RECOVERY => Self::Namespace,
            _ => Self::Controller,
        }
    }
}

/// Values of features since the last reset.
#[derive(Debug)]
pub struct Features {
    /// By feature, index and namespace; of what is the controller's that is unused.
    values: HashMap<(u8, u32, NamespaceId), u32>,
    /// Namespaces, which are numbered from 1.
    namespaces: u32,
    io_queues: u16,
    has_write_cache: bool,
    /// The host's time in ms, and when it said so.
    timestamp: Option<(u64, Instant)>,
    host_behavior: Vec<u8>,
}

/// A feature's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// In dword 0 of the completion.
    Number(u32),
    /// In memory.
    Data(Vec<u8>),
}

impl Features {
    /// All as after a reset.
    pub fn new(io_queues: u16, namespaces: u32, has_write_cache: bool) -> Self {
        Self {
            values: HashMap::new(),
            namespaces,
            io_queues,
            has_write_cache,
            timestamp: None,
            host_behavior: vec![0; 512],
        }
    }

    /// Bytes of memory that a value takes.
    pub fn data_length(feature: u8) -> u32 {
        match feature {
            feature::TIMESTAMP => 8,
            feature::HOST_BEHAVIOR => 512,
            _ => 0,
        }
    }

    fn default(&self, feature: u8, index: u32) -> Result<u32, Status> {
        if let Some((_, value, _)) = KEPT.iter().find(|(f, ..)| *f == feature) {
            return Ok(*value);
        }
        match feature {
            // Sensor 0 is the composite; over and under threshold (5.21.1.4).
            feature::TEMPERATURE_THRESHOLD => match index >> 16 & 0x3f {
                0 => Ok(TEMPERATURE_THRESHOLD),
                0x10 => Ok(0),
                _ => Err(Status::INVALID_FIELD),
            },
            feature::VOLATILE_WRITE_CACHE if self.has_write_cache => Ok(1),
            feature::NUMBER_OF_QUEUES => {
                let count = u32::from(self.io_queues - 1);
                Ok(count | count << 16)
            }
            feature::INTERRUPT_VECTOR if low(index) <= self.io_queues => Ok(low(index).into()),
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// Values are kept for each of these.
    fn key(feature: u8, index: u32, nsid: NamespaceId) -> (u8, u32, NamespaceId) {
        let index = match feature {
            feature::INTERRUPT_VECTOR => index & 0xffff,
            feature::TEMPERATURE_THRESHOLD => index & 0x3f_0000,
            _ => 0,
        };
        match Scope::of(feature) {
            Scope::Controller => (feature, index, NamespaceId::UNUSED),
            Scope::Namespace => (feature, index, nsid),
        }
    }

    /// Whether there is such a feature, and what it needs is there.
    fn check(&self, feature: u8, index: u32) -> Result<(), Status> {
        if Self::data_length(feature) == 0 {
            self.default(feature, index)?;
        }
        Ok(())
    }

    fn is_namespace(&self, nsid: NamespaceId) -> bool {
        (1..=self.namespaces).contains(&nsid.get())
    }

    /// A value can be got of one namespace, or of the controller, whoever is named (7.8).
    fn check_get(&self, feature: u8, nsid: NamespaceId) -> Result<(), Status> {
        let is_controller = matches!(nsid, NamespaceId::UNUSED | NamespaceId::ALL);
        match Scope::of(feature) {
            _ if self.is_namespace(nsid) => Ok(()),
            Scope::Controller if is_controller => Ok(()),
            Scope::Controller | Scope::Namespace => Err(Status::INVALID_NAMESPACE),
        }
    }

    /// A value can be set of one namespace or of all of them, or of the controller, if that is what
    /// is named (7.8).
    fn check_set(&self, feature: u8, nsid: NamespaceId) -> Result<(), Status> {
        match (Scope::of(feature), nsid) {
            (Scope::Controller, NamespaceId::UNUSED) | (_, NamespaceId::ALL) => Ok(()),
            (Scope::Namespace, _) if self.is_namespace(nsid) => Ok(()),
            (Scope::Controller, _) if self.is_namespace(nsid) => {
                Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC)
            }
            (Scope::Controller | Scope::Namespace, _) => Err(Status::INVALID_NAMESPACE),
        }
    }

    /// Get Features.
    pub fn get(
        &self,
        feature: u8,
        select: Select,
        nsid: NamespaceId,
        index: u32,
    ) -> Result<Value, Status> {
        self.check(feature, index)?;
        self.check_get(feature, nsid)?;
        if select == Select::Capabilities {
            let changeable = feature != feature::NUMBER_OF_QUEUES;
            let of_namespaces = Scope::of(feature) == Scope::Namespace;
            return Ok(Value::Number(
                u32::from(changeable) << 2 | u32::from(of_namespaces) << 1,
            ));
        }
        match feature {
            feature::TIMESTAMP => {
                let now = match self.timestamp.filter(|_| select == Select::Current) {
                    // Set by the host; it has not stopped since (figure 330, synch, origin).
                    Some((base, since)) => {
                        let passed = since.elapsed();
                        let passed = passed.as_secs() * 1000 + u64::from(passed.subsec_millis());
                        base.wrapping_add(passed) & TIMESTAMP_MASK | 1 << 49
                    }
                    None => 0,
                };
                Ok(Value::Data(now.to_le_bytes().to_vec()))
            }
            feature::HOST_BEHAVIOR if select == Select::Current => {
                Ok(Value::Data(self.host_behavior.clone()))
            }
            feature::HOST_BEHAVIOR => Ok(Value::Data(vec![0; 512])),
            _ => {
                let default = self.default(feature, index)?;
                let value = match select {
                    Select::Current => self.values.get(&Self::key(feature, index, nsid)).copied(),
                    _ => None,
                };
                Ok(Value::Number(value.unwrap_or(default)))
            }
        }
    }

    /// Set Features; `data` is as long as [`data_length`](Self::data_length) says. Returns dword 0
    /// of the completion.
    pub fn set(
        &mut self,
        feature: u8,
        nsid: NamespaceId,
        value: u32,
        data: &[u8],
    ) -> Result<u32, Status> {
        let value = match feature {
            feature::TEMPERATURE_THRESHOLD if value & SENSOR == SENSOR => value & !SENSOR,
            _ => value,
        };
        self.check(feature, value)?;
        self.check_set(feature, nsid)?;
        match feature {
            feature::TIMESTAMP => {
                let value = data.try_into().map_err(|_| Status::INVALID_FIELD)?;
                let base = u64::from_le_bytes(value) & TIMESTAMP_MASK;
                self.timestamp = Some((base, Instant::now()));
            }
            // Advanced command retry is not offered, so that the host's wish changes nothing.
            feature::HOST_BEHAVIOR if data.first().is_some_and(|&b| b > 1) => {
                return Err(Status::INVALID_FIELD);
            }
            feature::HOST_BEHAVIOR => self.host_behavior = data.to_vec(),
            feature::NUMBER_OF_QUEUES => {
                if low(value) == 0xffff || high(value) == 0xffff {
                    return Err(Status::INVALID_FIELD);
                }
                return self.default(feature, 0);
            }
            feature::POWER_MANAGEMENT if value & 0x1f != 0 => return Err(Status::INVALID_FIELD),
            // No namespace has that (NSFEAT).
            feature::ERROR_RECOVERY if value & UNWRITTEN_BLOCK_ERROR != 0 => {
                return Err(Status::INVALID_FIELD);
            }
            _ => {
                let named = match nsid {
                    NamespaceId::ALL => 1..=self.namespaces,
                    one => one.get()..=one.get(),
                };
                for nsid in named.map(NamespaceId::new) {
                    self.values.insert(Self::key(feature, value, nsid), value);
                }
            }
        }
        Ok(0)
    }

    /// Whether writes may stay in a cache until they are flushed.
    pub fn write_cache(&self) -> bool {
        let key = (feature::VOLATILE_WRITE_CACHE, 0, NamespaceId::UNUSED);
        self.values.get(&key).is_none_or(|value| value & 1 != 0)
    }
}

/// What can be reported without being asked for: errors (figure 146).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// A doorbell of a queue that there cannot be.
    InvalidDoorbell,
    /// A value that is no index of the queue.
    InvalidDoorbellValue,
}

impl AsyncEvent {
    /// Dword 0 of the completion: type error, information, log page.
    fn dword(self) -> u32 {
        let information = match self {
            Self::InvalidDoorbell => 0,
            Self::InvalidDoorbellValue => 1,
        };
        information << 8 | u32::from(crate::bits::log_page::ERRORS) << 16
    }
}

/// Event requests that wait, and an event that waits for one.
#[derive(Debug, Default)]
pub struct Events {
    requests: VecDeque<u16>,
    pending: Option<AsyncEvent>,
    /// Reported, and the log has not been read since: nothing more is reported.
    masked: bool,
}

impl Events {
    /// Holds a request. Returns the answer to it if there is something to report already.
    pub fn request(&mut self, cid: u16) -> Result<Option<(u16, u32)>, Status> {
        if self.requests.len() >= MAX_EVENT_REQUESTS {
            return Err(Status::EVENT_LIMIT_EXCEEDED);
        }
        self.requests.push_back(cid);
        Ok(self.answer())
    }

    fn answer(&mut self) -> Option<(u16, u32)> {
        if self.masked {
            return None;
        }
        let event = self.pending?;
        let cid = self.requests.pop_front()?;
        self.pending = None;
        self.masked = true;
        Some((cid, event.dword()))
    }

    /// Something happened: returns the request to be answered, with dword 0.
    pub fn report(&mut self, event: AsyncEvent) -> Option<(u16, u32)> {
        self.pending.get_or_insert(event);
        self.answer()
    }

    /// The error log was read.
    pub fn log_was_read(&mut self) -> Option<(u16, u32)> {
        self.masked = false;
        self.answer()
    }

    /// Takes a request back.
    pub fn abort(&mut self, cid: u16) -> bool {
        let before = self.requests.len();
        self.requests.retain(|&c| c != cid);
        self.requests.len() != before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNUSED: NamespaceId = NamespaceId::UNUSED;
    const ALL: NamespaceId = NamespaceId::ALL;

    #[test]
    fn values_are_kept_and_defaults_stay() {
        let mut features = Features::new(4, 2, true);
        assert_eq!(
            features.get(feature::NUMBER_OF_QUEUES, Select::Current, UNUSED, 0),
            Ok(Value::Number(0x3_0003))
        );
        assert_eq!(
            features.set(feature::NUMBER_OF_QUEUES, UNUSED, 0xff_00ff, &[]),
            Ok(0x3_0003)
        );
        assert!(features.write_cache());
        features
            .set(feature::VOLATILE_WRITE_CACHE, UNUSED, 0, &[])
            .unwrap();
        assert!(!features.write_cache());
        let get = |select| {
            features
                .get(feature::VOLATILE_WRITE_CACHE, select, UNUSED, 0)
                .unwrap()
        };
        assert_eq!(get(Select::Current), Value::Number(0));
        assert_eq!(get(Select::Default), Value::Number(1));
        assert_eq!(
            features.get(0x7f, Select::Current, UNUSED, 0),
            Err(Status::INVALID_FIELD)
        );
        assert_eq!(
            features.set(feature::INTERRUPT_VECTOR, UNUSED, 5, &[]),
            Err(Status::INVALID_FIELD)
        );
    }

    #[test]
    fn without_a_write_cache_there_is_no_such_feature() {
        let mut features = Features::new(1, 1, false);
        assert_eq!(
            features.set(feature::VOLATILE_WRITE_CACHE, UNUSED, 1, &[]),
            Err(Status::INVALID_FIELD)
        );
    }

    #[test]
    fn a_namespace_has_a_value_of_its_own_where_the_feature_is_a_namespaces() {
        let mut features = Features::new(4, 3, true);
        let recovery = feature::ERROR_RECOVERY;
        let namespace = NamespaceId::new;
        let get =
            |features: &Features, nsid| features.get(recovery, Select::Current, namespace(nsid), 0);
        assert_eq!(features.set(recovery, namespace(2), 7, &[]), Ok(0));
        assert_eq!(get(&features, 1), Ok(Value::Number(0)));
        assert_eq!(get(&features, 2), Ok(Value::Number(7)));
        assert_eq!(features.set(recovery, ALL, 8, &[]), Ok(0));
        assert_eq!(get(&features, 2), Ok(Value::Number(8)));
        assert_eq!(get(&features, 3), Ok(Value::Number(8)));
        for nsid in [0, 4, ALL.get() - 1] {
            let refused = Err(Status::INVALID_NAMESPACE);
            let set = features.set(recovery, namespace(nsid), 7, &[]);
            assert_eq!(set, refused, "{nsid:#x}");
        }
        for nsid in [0, 4, ALL.get()] {
            assert_eq!(
                get(&features, nsid),
                Err(Status::INVALID_NAMESPACE),
                "{nsid:#x}"
            );
        }
        let refused = Err(Status::INVALID_FIELD);
        assert_eq!(features.set(recovery, namespace(1), 1 << 16, &[]), refused);
        let capabilities = features.get(recovery, Select::Capabilities, namespace(1), 0);
        assert_eq!(capabilities, Ok(Value::Number(0b110)));
    }

    #[test]
    fn a_feature_of_the_controller_is_set_for_no_namespace() {
        let mut features = Features::new(4, 3, true);
        let cache = feature::VOLATILE_WRITE_CACHE;
        for (nsid, result) in [
            (UNUSED, Ok(0)),
            (ALL, Ok(0)),
            (
                NamespaceId::new(3),
                Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC),
            ),
            (NamespaceId::new(4), Err(Status::INVALID_NAMESPACE)),
        ] {
            assert_eq!(features.set(cache, nsid, 0, &[]), result, "{nsid:?}");
            let time = features.set(feature::TIMESTAMP, nsid, 0, &[0; 8]);
            assert_eq!(time, result, "{nsid:?}");
        }
        assert!(!features.write_cache());
        for nsid in [UNUSED, NamespaceId::new(1), NamespaceId::new(3), ALL] {
            let value = features.get(cache, Select::Current, nsid, 0);
            assert_eq!(value, Ok(Value::Number(0)), "{nsid:?}");
        }
        let unknown = NamespaceId::new(4);
        let value = features.get(cache, Select::Current, unknown, 0);
        assert_eq!(value, Err(Status::INVALID_NAMESPACE));
        // No such feature, whatever the namespace.
        let value = features.get(0x7f, Select::Current, unknown, 0);
        assert_eq!(value, Err(Status::INVALID_FIELD));
        // All sensors are the composite.
        let threshold = feature::TEMPERATURE_THRESHOLD;
        assert_eq!(features.set(threshold, UNUSED, 0xf_0150, &[]), Ok(0));
        let value = features.get(threshold, Select::Current, UNUSED, 0);
        assert_eq!(value, Ok(Value::Number(0x150)));
    }

    #[test]
    fn a_timestamp_goes_on_from_what_was_set() {
        let mut features = Features::new(1, 1, false);
        features
            .set(feature::TIMESTAMP, UNUSED, 0, &1000_u64.to_le_bytes())
            .unwrap();
        let Ok(Value::Data(data)) = features.get(feature::TIMESTAMP, Select::Current, UNUSED, 0)
        else {
            panic!("no data");
        };
        let value = u64::from_le_bytes(data.try_into().unwrap());
        assert!(value & TIMESTAMP_MASK >= 1000);
        assert_eq!(value >> 48, 2);
    }

    #[test]
    fn events_are_reported_once_until_the_log_is_read() {
        let mut events = Events::default();
        assert_eq!(events.request(7), Ok(None));
        assert_eq!(
            events.report(AsyncEvent::InvalidDoorbellValue),
            Some((7, 0x1_0100))
        );
        for cid in 0..4 {
            assert_eq!(events.request(cid), Ok(None));
        }
        assert_eq!(events.request(9), Err(Status::EVENT_LIMIT_EXCEEDED));
        assert_eq!(events.report(AsyncEvent::InvalidDoorbell), None);
        assert!(events.abort(0));
        assert_eq!(events.log_was_read(), Some((1, 0x1_0000)));
    }
}
