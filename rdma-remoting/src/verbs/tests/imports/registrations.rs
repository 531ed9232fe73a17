//! What processes register in a domain that they have together.

use super::*;
use crate::address_handles::HandlesOfDomain;
use crate::memory::{Binder, KeyError, Part, Use};
use crate::request::{Binding, MemoryKey, ResolveAddress as _};
use farlane_abi::rdma::{
    ACCESS_MW_BIND, ACCESS_REMOTE_WRITE, CreateAh, DeregMr, MR_SOURCE_BUFFER, MW_TYPE_2,
};
use farlane_zero_copy::{copy_from_slice, copy_to_slice};
use std::sync::atomic::Ordering;

/// The context of a domain, and of two that have imported it.
struct Scene {
    _server: Arc<Server>,
    port: Arc<Port>,
    owner: Arc<Context>,
    pd: Handle,
    importers: [(Arc<Context>, Handle); 2],
}

impl Scene {
    fn new() -> Self {
        let server = Server::without_workers();
        let port = port(&server, 1);
        let pool = Pool::separate_files(1 << 20);
        let open = |id| {
            let id = ContextId::new(id).unwrap();
            let events = Arc::new(Nobody);
            port.open(id, events, Some(Arc::clone(&pool))).unwrap()
        };
        let owner = open(0);
        let pd = CallHost::new(&owner).alloc_pd(()).unwrap();
        show(&owner, FILE, 7);
        CallHost::new(&owner).share_context(FILE.into()).unwrap();
        let importers = [1, 2].map(|id| {
            let context = open(id);
            show(&context, FILE, 7);
            let name = import_pd(&context, pd).unwrap();
            (context, name)
        });
        Self {
            _server: server,
            port,
            owner,
            pd,
            importers,
        }
    }

    fn close(&self, id: u32) {
        self.port.close(ContextId::new(id).unwrap()).unwrap();
    }

    /// Opens the first bytes of what a key of the domain names.
    fn find(&self, key: U32) -> Result<Part, KeyError> {
        let table = self.owner.engine_context.memory();
        let domain = domain(&self.owner, self.pd);
        table.open(domain, MemoryKey(key.get()), 0, 8, Use::LocalWrite)
    }

    /// What the port has of what is shared.
    fn ledger(&self) -> Vec<(&'static str, u64)> {
        let samples = self.port.samples();
        samples
            .iter()
            .map(|sample| (sample.name, sample.value))
            .collect()
    }
}

fn registration(pd: Handle, source: u32, object: u32) -> RegMr {
    RegMr {
        pd,
        access: (ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_MW_BIND).into(),
        source: source.into(),
        object: object.into(),
        length: PAGE_BYTES.into(),
        ..Default::default()
    }
}

/// Registers memory of a context that begins with these bytes.
fn register_bytes(context: &Arc<Context>, pd: Handle, pin: u32, bytes: &[u8; 8]) -> Mr {
    let (theirs, ours) = shared("registered", PAGE_BYTES);
    ours.write(0, bytes).unwrap();
    context.attach_pin(region(pin), theirs).unwrap();
    let request = registration(pd, MR_SOURCE_PIN, pin);
    CallHost::new(context).reg_mr(request).unwrap()
}

fn deregister_by(context: &Arc<Context>, pd: Handle, mr: &Mr) -> Result<(), Errno> {
    let mr = mr.handle;
    CallHost::new(context).dereg_imported_mr(DeregMr { pd, mr })
}

#[test]
fn a_key_of_the_domain_is_of_the_memory_of_who_has_registered_it() {
    let scene = Scene::new();
    // Each has other memory under the same number of a pin.
    let theirs = register_bytes(&scene.owner, scene.pd, 5, b"exporter");
    let [one, other] = &scene.importers;
    let first = register_bytes(&one.0, one.1, 5, b"importer");
    let second = register_bytes(&other.0, other.1, 5, b"2nd impo");
    for (mr, wanted) in [
        (&theirs, b"exporter"),
        (&first, b"importer"),
        (&second, b"2nd impo"),
    ] {
        let (part, mut bytes) = (scene.find(mr.lkey).unwrap(), [0; 8]);
        copy_to_slice(&part.region, part.offset, &mut bytes).unwrap();
        assert_eq!(&bytes, wanted);
        // Every importer is told of it.
        for (context, pd) in &scene.importers {
            let (pd, mr) = (*pd, mr.handle);
            let known = CallHost::new(context).import_mr(ImportMr { pd, mr });
            assert_eq!(known.unwrap().length.get(), PAGE_BYTES);
        }
    }
    // It is in that domain, and in no other one of either process.
    for context in [&scene.owner, &one.0] {
        let pd = CallHost::new(context).alloc_pd(()).unwrap();
        let domain = domain(context, pd);
        let table = context.engine_context.memory();
        let opened = table.open(domain, MemoryKey(first.lkey.get()), 0, 8, Use::LocalRead);
        assert!(opened.is_err());
    }
    // Nor does an importer's own table have it.
    let table = one.0.engine_context.memory();
    assert!(table.is_empty());
}

#[test]
fn a_registration_is_ended_by_the_process_that_has_made_it() {
    let scene = Scene::new();
    let [one, other] = &scene.importers;
    let theirs = register_bytes(&scene.owner, scene.pd, 5, b"exporter");
    let mr = register_bytes(&one.0, one.1, 5, b"importer");
    let by_owner = CallHost::new(&scene.owner).dereg_mr(mr.handle);
    assert_eq!(by_owner, Err(Errno::EBADF));
    assert_eq!(deregister_by(&other.0, other.1, &mr), Err(Errno::EBADF));
    assert_eq!(deregister_by(&one.0, one.1, &theirs), Err(Errno::EBADF));
    // Not by a handle of a context's own, nor of nothing.
    assert_eq!(CallHost::new(&one.0).dereg_mr(mr.handle), Err(Errno::EBADF));
    let own = CallHost::new(&one.0).alloc_pd(()).unwrap();
    assert_eq!(deregister_by(&one.0, own, &mr), Err(Errno::EINVAL));
    assert_eq!(deregister_by(&one.0, 0.into(), &mr), Err(Errno::EBADF));
    // Nobody else puts other memory under its keys either.
    let rereg = |context: &Arc<Context>, pd, mr: &Mr| {
        CallHost::new(context).rereg_mr(ReregMr {
            mr: mr.handle,
            registration: registration(pd, MR_SOURCE_PIN, 5),
            ..Default::default()
        })
    };
    other
        .0
        .attach_pin(region(5), memory("other", PAGE_BYTES))
        .unwrap();
    assert_eq!(rereg(&scene.owner, scene.pd, &mr), Err(Errno::EBADF));
    assert_eq!(rereg(&other.0, other.1, &mr), Err(Errno::EBADF));
    assert_eq!(rereg(&one.0, one.1, &theirs), Err(Errno::EBADF));
    assert_eq!(rereg(&one.0, one.1, &mr), Ok(()));
    assert!(scene.find(mr.lkey).is_ok() && scene.find(theirs.lkey).is_ok());
    // A name stays while something was registered by it.
    assert_eq!(CallHost::new(&one.0).dealloc_pd(one.1), Err(Errno::EBUSY));
    deregister_by(&one.0, one.1, &mr).unwrap();
    assert!(scene.find(mr.lkey).is_err() && scene.find(theirs.lkey).is_ok());
    assert_eq!(deregister_by(&one.0, one.1, &mr), Err(Errno::EBADF));
    CallHost::new(&one.0).dealloc_pd(one.1).unwrap();
}

#[test]
fn what_an_importer_has_registered_ends_with_it_and_nothing_else_does() {
    let scene = Scene::new();
    let theirs = register_bytes(&scene.owner, scene.pd, 5, b"exporter");
    let mut host = CallHost::new(&scene.owner);
    let [bound, free] = [(); 2].map(|()| {
        let window = AllocMw {
            pd: scene.pd,
            mw_type: MW_TYPE_2.into(),
        };
        host.alloc_mw(window).unwrap()
    });
    let [(one, name), _] = &scene.importers;
    // The table of the domain's context grows, and keeps that.
    let pins = [5, 6].map(|pin| register_bytes(one, *name, pin, b"importer"));
    pins.iter()
        .for_each(|mr| deregister_by(one, *name, mr).unwrap());
    one.detach(region(5)).unwrap();
    one.detach(region(6)).unwrap();
    let before = scene.ledger();

    let mr = register_bytes(one, *name, 5, b"importer");
    let buffer = CallHost::new(one).alloc_buffer(AllocBuffer {
        length: PAGE_BYTES.into(),
        ..Default::default()
    });
    let request = registration(*name, MR_SOURCE_BUFFER, buffer.unwrap().handle.get());
    let in_buffer = CallHost::new(one).reg_mr(request).unwrap();
    // The owner has bound a window to memory of the importer.
    let table = scene.owner.engine_context.memory();
    let (domain, binder) = (domain(&scene.owner, scene.pd), Binder::new_one());
    let binding = |window: &Mw| Binding {
        window: MemoryKey(window.rkey.get()),
        key: MemoryKey(window.rkey.get() ^ 1),
        region: MemoryKey(mr.lkey.get()),
        address: 0,
        length: PAGE_BYTES,
        access: ACCESS_REMOTE_WRITE,
    };
    table.bind((domain, binder), &binding(&bound)).unwrap();
    assert_eq!(deregister_by(one, *name, &mr), Err(Errno::EBUSY));
    let key = binding(&bound).key;
    let through = table.open_to_peer((domain, binder), key, 0, 8, Use::RemoteWrite);
    let opened = [
        scene.find(mr.lkey).unwrap(),
        scene.find(in_buffer.lkey).unwrap(),
        through.unwrap(),
    ];
    let write = |part: &Part| copy_from_slice(&part.region, part.offset, b"overwrit");
    assert!(opened.iter().all(|part| write(part).is_ok()));
    assert_ne!(scene.ledger(), before);

    scene.close(1);
    // Neither what was opened before nor anything by its keys reaches memory.
    assert!(opened.iter().all(|part| write(part).is_err()));
    assert!(scene.find(mr.lkey).is_err() && scene.find(in_buffer.lkey).is_err());
    let through = table.open_to_peer((domain, binder), key, 0, 8, Use::RemoteWrite);
    assert!(through.is_ok_and(|part| write(&part).is_err()));
    assert!(table.bind((domain, binder), &binding(&free)).is_err());
    // The window is there still, and keeps nothing of it.
    assert_eq!(scene.ledger(), before);
    CallHost::new(&scene.owner)
        .dealloc_mw(bound.handle)
        .unwrap();
    let (part, mut bytes) = (scene.find(theirs.lkey).unwrap(), [0; 8]);
    copy_to_slice(&part.region, part.offset, &mut bytes).unwrap();
    assert_eq!(&bytes, b"exporter");
    let regions = scene.owner.counters.memory_regions.load(Ordering::Relaxed);
    assert_eq!(regions, 1);
}

#[test]
fn what_was_registered_in_a_domain_ends_with_its_context() {
    let scene = Scene::new();
    let [(one, name), _] = &scene.importers;
    let mr = register_bytes(one, *name, 5, b"importer");
    let part = scene.find(mr.lkey).unwrap();
    scene.close(0);
    assert!(copy_from_slice(&part.region, part.offset, b"overwrit").is_err());
    // Nothing is put there any more.
    let request = registration(*name, MR_SOURCE_PIN, 5);
    assert_eq!(CallHost::new(one).reg_mr(request), Err(Errno::EINVAL));
    // Its process does not notice when it ends what is no more.
    deregister_by(one, *name, &mr).unwrap();
    CallHost::new(one).dealloc_pd(*name).unwrap();
    scene.port.close_all();
    assert!(
        scene
            .ledger()
            .iter()
            .all(|(name, value)| name.ends_with("_limit") || *value == 0)
    );
    let regions = one.counters.memory_regions.load(Ordering::Relaxed);
    assert_eq!(regions, 0);
}

#[test]
fn windows_and_addresses_of_an_importer_are_of_the_domain_and_end_with_it() {
    let scene = Scene::new();
    let mr = register_bytes(&scene.owner, scene.pd, 5, b"exporter");
    let [(one, name), _] = &scene.importers;
    let window = |context: &Arc<Context>, pd| {
        let mw_type = MW_TYPE_2.into();
        CallHost::new(context).alloc_mw(AllocMw { pd, mw_type })
    };
    // The room of keys is kept.
    for context in [(&scene.owner, scene.pd), (one, *name), (one, *name)] {
        let window = window(context.0, context.1).unwrap();
        CallHost::new(context.0).dealloc_mw(window.handle).unwrap();
    }
    let before = scene.ledger();
    let bound = window(one, *name).unwrap();
    let binding = Binding {
        window: MemoryKey(bound.rkey.get()),
        key: MemoryKey(bound.rkey.get() ^ 1),
        region: MemoryKey(mr.lkey.get()),
        address: 0,
        length: PAGE_BYTES,
        access: ACCESS_REMOTE_WRITE,
    };
    let table = scene.owner.engine_context.memory();
    let of = (domain(&scene.owner, scene.pd), Binder::new_one());
    table.bind(of, &binding).unwrap();
    let open = || table.open_to_peer(of, binding.key, 0, 8, Use::RemoteWrite);
    let part = open().unwrap();
    // Two names of a domain are one domain to datagrams, and another domain is not.
    let again = import_pd(one, scene.pd).unwrap();
    let own = CallHost::new(one).alloc_pd(()).unwrap();
    let address = CreateAh {
        pd: *name,
        dlid: 1.into(),
        port_num: 1,
        ..Default::default()
    };
    let ah = CallHost::new(one).create_ah(address).unwrap();
    let resolves = |pd: Handle| {
        let of = HandlesOfDomain {
            handles: Arc::clone(&one.addresses),
            domain: one.objects().pds.get(pd.get()).unwrap().id,
        };
        of.resolve(ah.get()).is_some()
    };
    assert!(resolves(*name) && resolves(again) && !resolves(own));
    assert_eq!(CallHost::new(one).dealloc_pd(*name), Err(Errno::EBUSY));

    scene.close(1);
    assert!(open().is_err());
    assert!(copy_from_slice(&part.region, part.offset, b"overwrit").is_err());
    assert_eq!(scene.ledger(), before);
    // It was the only one.
    CallHost::new(&scene.owner).dereg_mr(mr.handle).unwrap();
    // A window whose domain has ended is none any more.
    let [_, (other, name)] = &scene.importers;
    let late = window(other, *name).unwrap();
    scene.close(0);
    assert_eq!(window(other, *name), Err(Errno::EINVAL));
    CallHost::new(other).dealloc_mw(late.handle).unwrap();
    CallHost::new(other).dealloc_pd(*name).unwrap();
}
