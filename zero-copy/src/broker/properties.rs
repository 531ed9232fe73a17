//! What holds for any publication, any message and any order of them: both ends without threads.

use super::still::{self, StillPublisher, StillSubscriber, connection};
use super::*;
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendFlags, send};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

const FILE_BYTES: u64 = 16 * PAGE_BYTES;

#[derive(Debug, Default)]
struct Held(Mutex<BTreeMap<u64, Publication>>);

impl Held {
    fn ids(&self) -> BTreeSet<u64> {
        self.0.lock().unwrap().keys().copied().collect()
    }
}

impl Subscriber for Held {
    fn published(&self, id: u64, publication: Publication) {
        publication.check().unwrap();
        assert!(self.0.lock().unwrap().insert(id, publication).is_none());
    }

    fn revoked(&self, id: u64) {
        assert!(self.0.lock().unwrap().remove(&id).is_some());
    }
}

/// A subscriber of a publisher, and its number.
fn join(publisher: &StillPublisher) -> (u64, StillSubscriber, Arc<Held>) {
    let (near, far) = connection().unwrap();
    let held = Arc::new(Held::default());
    let subscriber = StillSubscriber::new(far, Arc::clone(&held) as _).unwrap();
    (publisher.admit(near).unwrap(), subscriber, held)
}

fn plain(address: u64, length: u64) -> Publication {
    Publication {
        address,
        length,
        writable: true,
        node: None,
        file: None,
        origin: None,
    }
}

/// Numbers around those that matter.
fn near() -> impl Strategy<Value = u64> {
    let borders = prop::sample::select(vec![0, PAGE_BYTES, FILE_BYTES, ADDRESS_END, u64::MAX]);
    let around = (borders, -2_i64..=2, prop::bool::ANY).prop_map(|(border, by, pages)| {
        let unit = if pages { PAGE_BYTES.cast_signed() } else { 1 };
        border.wrapping_add_signed(by * unit)
    });
    prop_oneof![
        around,
        any::<u64>(),
        (0..32_u64).prop_map(|p| p * PAGE_BYTES)
    ]
}

proptest! {
    #[test]
    fn exactly_pages_of_the_address_space_that_the_file_has_are_well_formed(
        address in near(),
        length in near(),
        offset in prop::option::of(near()),
    ) {
        let file = offset.map(|offset| {
            let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, FILE_BYTES).unwrap();
            (Arc::new(file), offset)
        });
        let is_page = |n: u64| n.is_multiple_of(PAGE_BYTES);
        let fits = |start: u64, end: u64| u128::from(start) + u128::from(length) <= u128::from(end);
        let wanted = length > 0
            && is_page(address)
            && is_page(length)
            && fits(address, ADDRESS_END)
            && offset.is_none_or(|offset| is_page(offset) && fits(offset, FILE_BYTES));
        let publication = Publication { file, ..plain(address, length) };
        prop_assert_eq!(publication.check().is_ok(), wanted);
    }

    #[test]
    fn what_is_published_arrives_as_it_is(
        page in 0..1000_u64,
        pages in 1..16_u64,
        writable: bool,
        node in prop::option::of(any::<u32>()),
        with_file: bool,
        origin in prop::option::of(("[!-~]{1,64}", "[!-~]{1,64}", any::<u8>(), 0..u64::MAX >> 1)),
        key: [u8; 16],
    ) {
        let publication = Publication {
            writable,
            node: node.map(Node),
            file: with_file.then(|| {
                let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
                ftruncate(&file, FILE_BYTES).unwrap();
                (Arc::new(file), 0)
            }),
            origin: origin.map(|(lender, device, region, offset)| Origin {
                lender,
                device,
                region,
                offset,
                key,
            }),
            ..plain(page * PAGE_BYTES, pages * PAGE_BYTES)
        };
        let publisher = StillPublisher::new().unwrap();
        let (number, mut subscriber, held) = join(&publisher);
        let id = publisher.publish(publication.clone()).unwrap();
        prop_assert!(publisher.turn(number) && subscriber.turn());
        let held = held.0.lock().unwrap();
        let got = &held[&id];
        prop_assert_eq!((got.address, got.length), (publication.address, publication.length));
        prop_assert_eq!((got.writable, got.node), (publication.writable, publication.node));
        prop_assert_eq!(&got.origin, &publication.origin);
        prop_assert_eq!(got.file.is_some(), publication.file.is_some());
    }

    #[test]
    fn whatever_a_subscriber_says_the_others_know_what_is_published(
        steps in prop::collection::vec(
            (0..7_u8, 0..8_u64, prop::collection::vec(any::<u8>(), 1..1100)),
            0..40,
        ),
    ) {
        let publisher = StillPublisher::new().unwrap();
        let (number, mut subscriber, held) = join(&publisher);
        let (near, hostile) = connection().unwrap();
        let stranger = publisher.admit(near).unwrap();
        let mut known = BTreeMap::new();
        let say = |bytes: &[u8]| {
            let _ = send(&hostile, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        };
        for (step, page, bytes) in steps {
            match step {
                0 | 1 => {
                    let publication = plain(page * PAGE_BYTES, PAGE_BYTES);
                    let result = publisher.publish(publication);
                    prop_assert_eq!(result.is_ok(), known.values().all(|&p| p != page));
                    if let Ok(id) = result {
                        known.insert(id, page);
                    }
                }
                2 => {
                    let id = known.iter().find(|&(_, &p)| p == page).map(|(&id, _)| id);
                    prop_assert_eq!(publisher.begin_revoking(id.unwrap_or(u64::MAX)), id.is_some());
                    if let Some(id) = id {
                        prop_assert!(publisher.turn(number) && subscriber.turn());
                        prop_assert!(publisher.turn(number));
                        publisher.end_revoking(id);
                        known.remove(&id);
                        prop_assert!(!publisher.held_by(stranger).contains(&id));
                    }
                }
                3 => say(&still::hello(wire::VERSION)),
                4 => say(&still::released(page)),
                5 => say(&bytes),
                _ => {
                    publisher.turn(stranger);
                }
            }
        }
        publisher.turn(stranger);
        prop_assert!(publisher.turn(number) && publisher.turn(number) && subscriber.turn());
        prop_assert_eq!(held.ids(), known.keys().copied().collect());
    }
}

#[test]
fn who_is_revoked_twice_at_a_time_is_told_once() {
    let publisher = StillPublisher::new().unwrap();
    let (number, mut subscriber, held) = join(&publisher);
    let id = publisher.publish(plain(0, PAGE_BYTES)).unwrap();
    assert!(publisher.turn(number) && publisher.turn(number) && subscriber.turn());
    assert_eq!(held.ids(), BTreeSet::from([id]));
    assert!(publisher.begin_revoking(id));
    assert!(publisher.begin_revoking(id));
    assert!(publisher.turn(number) && subscriber.turn());
    assert!(publisher.turn(number) && subscriber.turn());
    assert!(held.ids().is_empty() && publisher.held_by(number).is_empty());
}
