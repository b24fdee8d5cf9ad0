//! Open files that a machine keeps over an execution of this program, by the parts that have them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};

/// Files of one part of a machine.
#[derive(Debug, Default)]
pub struct KeptPart {
    files: Vec<OwnedFd>,
    /// Device and inode number of the socket's file that the machine made, and removes at its end.
    made: Option<[u64; 2]>,
    /// Size of a disk as the guest knows it.
    sectors: u64,
    /// Whether vhost workers serve it. A worker belongs to one execution, so that each opens its own.
    uses_vhost: bool,
}

impl KeptPart {
    /// Duplicates of `files`.
    ///
    /// # Errors
    /// When descriptors run out.
    pub(crate) fn of<'a>(files: impl IntoIterator<Item = BorrowedFd<'a>>) -> io::Result<Self> {
        let files = files.into_iter().map(|file| file.try_clone_to_owned());
        Ok(Self { files: files.collect::<io::Result<_>>()?, ..Self::default() })
    }

    /// The same for the file that [`Listener::made`](crate::listener::Listener::made) names.
    pub(crate) fn with_made(self, made: Option<[u64; 2]>) -> Self {
        Self { made, ..self }
    }

    /// The same for a disk.
    pub(crate) fn with_sectors(self, sectors: u64) -> Self {
        Self { sectors, ..self }
    }

    /// The same for a device that vhost workers serve, or not.
    pub(crate) fn with_vhost(self, uses_vhost: bool) -> Self {
        Self { uses_vhost, ..self }
    }

    pub(crate) const fn uses_vhost(&self) -> bool {
        self.uses_vhost
    }

    pub(crate) const fn sectors(&self) -> u64 {
        self.sectors
    }

    pub(crate) const fn made(&self) -> Option<[u64; 2]> {
        self.made
    }

    pub(crate) fn files(&self) -> &[OwnedFd] {
        &self.files
    }

    /// Duplicates of its files.
    ///
    /// # Errors
    /// When descriptors run out.
    pub(crate) fn duplicates(&self) -> io::Result<Vec<File>> {
        self.files.iter().map(|file| file.try_clone().map(File::from)).collect()
    }

    /// A duplicate of its first file.
    ///
    /// # Errors
    /// It has none, or descriptors run out.
    pub(crate) fn first(&self) -> io::Result<File> {
        let first = self.files.first().ok_or(io::ErrorKind::NotFound)?;
        Ok(File::from(first.try_clone()?))
    }
}

/// Files of all parts of a machine.
#[derive(Debug, Default)]
pub(crate) struct KeptFiles(BTreeMap<String, KeptPart>);

/// A part as the state of an execution names it; its files follow those of the part before it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct KeptName {
    part: String,
    count: usize,
    made: Option<[u64; 2]>,
    sectors: u64,
    uses_vhost: bool,
}

impl KeptFiles {
    /// Name of the console.
    pub(crate) const CONSOLE: &str = "console";

    /// Name of the kernel and the initramfs.
    pub(crate) const BOOT: &str = "boot";

    /// Name of the backing `id`.
    pub(crate) fn memory(id: &str) -> String {
        format!("memory {id}")
    }

    /// Name of the device `id`.
    pub(crate) fn device(id: &str) -> String {
        format!("device {id}")
    }

    pub(crate) fn add(&mut self, name: String, part: KeptPart) {
        self.0.insert(name, part);
    }

    pub(crate) fn part(&self, name: &str) -> Option<&KeptPart> {
        self.0.get(name)
    }

    pub(crate) fn names(&self) -> Vec<KeptName> {
        let name = |(part, kept): (&String, &KeptPart)| {
            let KeptPart { files, made, sectors, uses_vhost } = kept;
            let (part, count) = (part.clone(), files.len());
            KeptName { part, count, made: *made, sectors: *sectors, uses_vhost: *uses_vhost }
        };
        self.0.iter().map(name).collect()
    }

    /// All files, in the order of [`names`](Self::names).
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.values().flat_map(|part| &part.files).map(AsFd::as_fd)
    }

    /// The same with duplicates of all files.
    ///
    /// # Errors
    /// When descriptors run out.
    pub(crate) fn duplicate(&self) -> io::Result<Self> {
        let duplicate = |(name, part): (&String, &KeptPart)| {
            let files = KeptPart::of(part.files.iter().map(AsFd::as_fd))?;
            Ok((name.clone(), KeptPart { files: files.files, ..*part }))
        };
        Ok(Self(self.0.iter().map(duplicate).collect::<io::Result<_>>()?))
    }

    /// The parts `names`; `descriptors` begin with their files.
    ///
    /// # Errors
    /// There are fewer.
    pub(crate) fn received(
        names: Vec<KeptName>,
        descriptors: &mut impl Iterator<Item = OwnedFd>,
    ) -> io::Result<Self> {
        let mut parts = BTreeMap::new();
        for KeptName { part, count, made, sectors, uses_vhost } in names {
            let files: Vec<_> = descriptors.take(count).collect();
            if files.len() != count {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            parts.insert(part, KeptPart { files, made, sectors, uses_vhost });
        }
        Ok(Self(parts))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};

    use super::*;

    #[test]
    fn files_come_back_under_the_names_of_their_parts() {
        let mut kept = KeptFiles::default();
        let file = |text: &str| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(text.as_bytes()).unwrap();
            file
        };
        let (one, two, three) = (file("one"), file("two"), file("three"));
        kept.add(KeptFiles::device("net0"), KeptPart::of([one.as_fd(), two.as_fd()]).unwrap());
        let console = KeptPart::of([three.as_fd()]).unwrap().with_made(Some([1, 2])).with_vhost(true);
        kept.add(KeptFiles::CONSOLE.to_owned(), console);
        kept.add(KeptFiles::device("rng0"), KeptPart::default());
        let mut passed: Vec<_> = kept.descriptors().map(|file| file.try_clone_to_owned().unwrap()).collect();
        passed.push(file("more").into());
        let mut passed = passed.into_iter();
        let received = KeptFiles::received(kept.names(), &mut passed).unwrap();
        assert_eq!(passed.len(), 1);
        let text = |file: &OwnedFd| {
            let (mut file, mut text) = (File::from(file.try_clone().unwrap()), String::new());
            file.rewind().unwrap();
            file.read_to_string(&mut text).unwrap();
            text
        };
        let texts = |name: &str| received.part(name).unwrap().files().iter().map(text).collect::<Vec<_>>();
        assert_eq!(texts("device net0"), ["one", "two"]);
        assert_eq!((texts("console"), texts("device rng0").len()), (vec!["three".to_owned()], 0));
        let console = received.part("console").unwrap();
        assert_eq!((console.made(), console.uses_vhost()), (Some([1, 2]), true));
        assert!(KeptFiles::received(kept.names(), &mut std::iter::empty()).is_err());
    }
}
