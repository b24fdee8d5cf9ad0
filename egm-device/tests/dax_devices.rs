//! A device per slice, on a host with a dynamic device-DAX region and no other devices: real sysfs, real mappings.
//!
//! A kernel command line such as `memmap=256M%0x20000000-1+0xefffffff dax_hmem.region_idle=1` makes any machine or
//! emulator such a host. The tests use the host's own ledger, so that they never take a slice that a machine has.

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use std::sync::{Mutex, MutexGuard, PoisonError};
    use std::thread;

    use egm_device::carve::plan::Request;
    use egm_device::ledger::{GrantError, Identity, Paths, Watch};
    use egm_device::owner::Owner;
    use egm_device::region::{Region, Survey};
    use egm_device::{Backing, Lease, Ledger, Mapping};
    use nix::fcntl::{FcntlArg, fcntl};
    use nix::libc::{F_UNLCK, SEEK_SET, flock};

    const SECRET: &[u8] = b"of the first owner";

    /// The tests count the devices of one region.
    static ONE: Mutex<()> = Mutex::new(());

    struct Host {
        ledger: Ledger,
        region: Region,
        _only: MutexGuard<'static, ()>,
    }

    /// This host, if it has such a region with room for two slices.
    fn host() -> Option<Host> {
        let root = Path::new("/");
        let region = Survey::of(root, &[]).regions.into_iter().find(|region| region.kind.has_slice_devices());
        let Some(region) = region.filter(|region| region.base.is_some() && region.size.get() >= 8 << 20)
        else {
            println!(
                "skipped: no dynamic device-DAX region of this host is split into devices, or this user is not root"
            );
            return None;
        };
        let only = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let ledger = Ledger::open(Paths::below(root), Identity::read(root).unwrap()).unwrap();
        Some(Host { ledger, region, _only: only })
    }

    impl Host {
        fn size(&self) -> u64 {
            2 * self.region.page_size.get()
        }

        fn grant(&self, at: Option<u64>) -> Result<Lease, GrantError> {
            let request = Request { at, ..Request::new(self.size(), Owner::this("dax-devices")) };
            self.ledger.grant(&self.region, &request, &Watch::unobserved())
        }

        fn devices(&self) -> usize {
            let prefix = format!("{}.", self.region.name);
            let names = fs::read_dir("/sys/bus/dax/devices").unwrap().map(|entry| entry.unwrap().file_name());
            names.filter(|name| name.to_str().unwrap().starts_with(&prefix)).count() - 1
        }
    }

    /// A client's access to a slice: its own descriptor of the same description.
    struct Client {
        file: File,
        size: u64,
        page: u64,
    }

    impl Backing for Client {
        fn file(&self) -> &File {
            &self.file
        }
        fn offset(&self) -> u64 {
            0
        }
        fn size(&self) -> u64 {
            self.size
        }
        fn page_size(&self) -> u64 {
            self.page
        }
        fn is_invisible(&self) -> bool {
            false
        }
        fn outlives_power(&self) -> bool {
            false
        }
    }

    impl Client {
        fn of(lease: &Lease) -> Self {
            assert_eq!(lease.offset(), 0);
            Self { file: lease.file().try_clone().unwrap(), size: lease.size(), page: lease.page_size() }
        }

        fn map(&self) -> std::io::Result<Mapping> {
            Mapping::new(self, 0, self.size, 0).map_err(|error| error.source)
        }

        /// Drops the lock that shows the memory as used.
        fn forge(&self) {
            let l_type = i16::try_from(F_UNLCK).unwrap();
            let l_whence = i16::try_from(SEEK_SET).unwrap();
            let all = flock { l_type, l_whence, l_start: 0, l_len: 0, l_pid: 0 };
            fcntl(&self.file, FcntlArg::F_OFD_SETLK(&all)).unwrap();
        }
    }

    /// The first bytes of `mapping`, read by the kernel: an error where a load would be a SIGBUS.
    fn look(mapping: &Mapping, at: usize) -> std::io::Result<Vec<u8>> {
        let address = u64::try_from(mapping.as_ptr().addr() + at).unwrap();
        let mut bytes = vec![0; SECRET.len()];
        File::open("/proc/self/mem")?.read_exact_at(&mut bytes, address).map(|()| bytes)
    }

    /// Writes the first bytes of `mapping` as [`look`] reads them.
    fn write(mapping: &Mapping, bytes: &[u8]) -> std::io::Result<()> {
        let address = u64::try_from(mapping.as_ptr().addr()).unwrap();
        File::options().write(true).open("/proc/self/mem")?.write_all_at(bytes, address)
    }

    #[test]
    fn a_slice_has_a_device_of_its_own_that_reaches_no_other_slice_and_goes_with_it() {
        let Some(host) = host() else { return };
        let before = host.devices();
        let (first, second) = (host.grant(None).unwrap(), host.grant(None).unwrap());
        assert_eq!(host.devices(), before + 2);
        assert_ne!(first.slice().offset, second.slice().offset);
        let (mine, other) = (Client::of(&first), Client::of(&second).map().unwrap());
        other.write(0, SECRET).unwrap();
        // A mapping that is larger than the device reaches nothing behind its end.
        let size = host.size();
        let beyond = Client { file: mine.file.try_clone().unwrap(), size: 2 * size, page: mine.page };
        if let Ok(beyond) = beyond.map() {
            assert!(look(&beyond, usize::try_from(size).unwrap()).is_err());
        }
        drop((beyond, other, mine));
        first.return_slice(&Watch::unobserved()).unwrap();
        second.return_slice(&Watch::unobserved()).unwrap();
        assert_eq!(host.devices(), before);
    }

    #[test]
    fn a_client_that_forges_the_lock_and_keeps_the_memory_loses_it_before_the_next_owner_has_it() {
        let Some(host) = host() else { return };
        let lease = host.grant(None).unwrap();
        let at = lease.slice().offset;
        let client = Client::of(&lease);
        let mapping = client.map().unwrap();
        mapping.write(0, SECRET).unwrap();
        assert_eq!(look(&mapping, 0).unwrap(), SECRET);
        client.forge();
        // The client writes until the kernel refuses: nothing of it may reach the memory after the scrub.
        thread::scope(|scope| {
            scope.spawn(|| while write(&mapping, SECRET).is_ok() {});
            lease.return_slice(&Watch::unobserved()).unwrap();
        });
        assert!(look(&mapping, 0).is_err());
        let next = host.grant(Some(at)).unwrap();
        assert_eq!(look(&Client::of(&next).map().unwrap(), 0).unwrap(), vec![0; SECRET.len()]);
        Client::of(&next).map().unwrap().write(0, b"of the second owner").unwrap();
        // Neither the old mapping nor the old descriptor came back to life with the new device.
        assert!(look(&mapping, 0).is_err());
        assert!(client.map().is_err_and(|error| error.raw_os_error().is_some()));
        next.return_slice(&Watch::unobserved()).unwrap();
    }

    #[test]
    fn a_client_that_keeps_its_lock_keeps_the_slice_from_others() {
        let Some(host) = host() else { return };
        let lease = host.grant(None).unwrap();
        let at = lease.slice().offset;
        let client = Client::of(&lease);
        let mapping = client.map().unwrap();
        mapping.write(0, SECRET).unwrap();
        assert!(matches!(lease.return_slice(&Watch::unobserved()), Err(GrantError::StillUsed { .. })));
        assert!(matches!(host.grant(Some(at)), Err(GrantError::Short { .. })));
        assert_eq!(look(&mapping, 0).unwrap(), SECRET);
        drop((mapping, client));
        host.grant(Some(at)).unwrap().return_slice(&Watch::unobserved()).unwrap();
    }

    #[test]
    fn what_an_owner_left_that_ended_without_a_return_is_removed_for_the_next() {
        let Some(host) = host() else { return };
        let before = host.devices();
        let lease = host.grant(None).unwrap();
        let at = lease.slice().offset;
        let client = Client::of(&lease);
        let mapping = client.map().unwrap();
        mapping.write(0, SECRET).unwrap();
        client.forge();
        // As after kill -9: nothing is returned.
        drop(lease);
        assert_eq!(host.devices(), before + 1);
        let next = host.grant(Some(at)).unwrap();
        assert_eq!(host.devices(), before + 1);
        assert!(look(&mapping, 0).is_err());
        assert_eq!(look(&Client::of(&next).map().unwrap(), 0).unwrap(), vec![0; SECRET.len()]);
        next.return_slice(&Watch::unobserved()).unwrap();
        assert_eq!(host.devices(), before);
    }
}
