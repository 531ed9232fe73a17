//! What a context may have of another one.

use super::*;
use crate::FileId;
use farlane_abi::rdma::{ImportMr, ImportPd};

mod registrations;

const FILE: u32 = 3;

fn show(context: &Arc<Context>, region_id: u32, number: u64) {
    let shown = context.attach_file(region(region_id), FileId(0, number));
    shown.unwrap();
}

fn import_pd(context: &Arc<Context>, pd: Handle) -> Result<Handle, Errno> {
    let region = FILE.into();
    CallHost::new(context).import_pd(ImportPd { region, pd })
}

#[test]
fn a_file_stands_for_one_context_of_its_tenant_and_only_for_who_shows_it() {
    let server = Server::without_workers();
    let (one, other) = (port(&server, 1), port(&server, 2));
    let [owner, beside] = [0, 1].map(|id| open(&one, id));
    let stranger = open(&other, 0);
    let pd = CallHost::new(&owner).alloc_pd(()).unwrap();
    for context in [&owner, &beside, &stranger] {
        show(context, FILE, 7);
    }
    show(&owner, 4, 8);
    let share = |context, region: u32| CallHost::new(context).share_context(region.into());
    let find = |context, region: u32| CallHost::new(context).import_context(region.into());
    // It stands for nothing before its process has said so.
    assert_eq!(find(&beside, FILE), Err(Errno::EINVAL));
    share(&owner, FILE).unwrap();
    assert_eq!(share(&owner, 4), Err(Errno::EBUSY), "it has one");
    assert_eq!(share(&beside, FILE), Err(Errno::EBUSY), "it is another's");
    assert_eq!(owner.detach(region(FILE)), Err(Errno::EBUSY));
    find(&beside, FILE).unwrap();
    // The same number says nothing at another tenant's.
    assert_eq!(find(&stranger, FILE), Err(Errno::EINVAL));
    assert_eq!(import_pd(&stranger, pd), Err(Errno::EINVAL));
    for nothing in [0, 9, u32::MAX] {
        assert_eq!(find(&beside, nothing), Err(Errno::EINVAL));
        assert_eq!(share(&beside, nothing), Err(Errno::EINVAL));
    }
    import_pd(&beside, pd).unwrap();
    one.close(ContextId::new(0).unwrap()).unwrap();
    assert_eq!(find(&beside, FILE), Err(Errno::EINVAL));
    assert_eq!(import_pd(&beside, pd), Err(Errno::EINVAL));
    share(&beside, FILE).unwrap();
}

#[test]
fn an_imported_domain_is_a_name_and_is_not_handed_on() {
    let server = Server::without_workers();
    let port = port(&server, 1);
    let [owner, user] = [0, 1].map(|id| open(&port, id));
    let [pd, other] = [(); 2].map(|()| CallHost::new(&owner).alloc_pd(()).unwrap());
    for context in [&owner, &user] {
        show(context, FILE, 7);
    }
    CallHost::new(&owner).share_context(FILE.into()).unwrap();
    owner
        .attach_pin(region(5), memory("exported", PAGE_BYTES))
        .unwrap();
    let mr = register(&owner, pd, 5).unwrap();
    let elsewhere = register(&owner, other, 5).unwrap();
    let imported = import_pd(&user, pd).unwrap();
    let import_mr = |pd, mr| CallHost::new(&user).import_mr(ImportMr { pd, mr });
    let known = import_mr(imported, mr.handle).unwrap();
    assert_eq!((known.lkey, known.rkey), (mr.lkey, mr.rkey));
    assert_eq!(known.length.get(), PAGE_BYTES);
    // One of no memory is of all addresses, and has no key for peers, there as here.
    let mut host = CallHost::new(&owner);
    host.negotiate(VersionRange::ours()).unwrap();
    let null = host.alloc_null_mr(pd).unwrap();
    let known = import_mr(imported, null.handle).unwrap();
    assert_eq!((known.lkey, known.rkey.get()), (null.lkey, 0));
    assert_eq!(known.length.get(), u64::MAX);
    host.dereg_mr(null.handle).unwrap();
    let own = CallHost::new(&user).alloc_pd(()).unwrap();
    for (pd, mr, error) in [
        (imported, elsewhere.handle, Errno::EINVAL),
        (imported, 0.into(), Errno::EINVAL),
        (own, mr.handle, Errno::EINVAL),
        (0.into(), mr.handle, Errno::EBADF),
    ] {
        assert_eq!(import_mr(pd, mr), Err(error));
    }
    // A name is not handed on.
    show(&owner, 6, 9);
    show(&user, 6, 9);
    CallHost::new(&user).share_context(6.into()).unwrap();
    let handed_on = CallHost::new(&owner).import_pd(ImportPd {
        region: 6.into(),
        pd: imported,
    });
    assert_eq!(handed_on, Err(Errno::EOPNOTSUPP));
    // The domain is there as long as a name of it.
    CallHost::new(&owner).dereg_mr(mr.handle).unwrap();
    assert_eq!(CallHost::new(&owner).dealloc_pd(pd), Err(Errno::EBUSY));
    port.close(ContextId::new(1).unwrap()).unwrap();
    CallHost::new(&owner).dealloc_pd(pd).unwrap();
}
