//! Descriptors that came from another process.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// Descriptors in the order in which they came. Each is closed with its last copy.
#[derive(Debug, Clone, Default)]
pub(crate) struct Passed(Vec<Arc<OwnedFd>>);

impl Passed {
    pub(crate) const fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<OwnedFd>> {
        self.0.iter()
    }

    pub(crate) fn get(&self, index: usize) -> Option<&Arc<OwnedFd>> {
        self.0.get(index)
    }

    /// Their numbers in this process.
    pub(crate) fn numbers(&self) -> Vec<RawFd> {
        self.iter().map(|descriptor| descriptor.as_raw_fd()).collect()
    }
}

impl FromIterator<OwnedFd> for Passed {
    fn from_iter<T: IntoIterator<Item = OwnedFd>>(descriptors: T) -> Self {
        Self(descriptors.into_iter().map(Arc::new).collect())
    }
}

impl FromIterator<Arc<OwnedFd>> for Passed {
    fn from_iter<T: IntoIterator<Item = Arc<OwnedFd>>>(descriptors: T) -> Self {
        Self(descriptors.into_iter().collect())
    }
}

impl PartialEq for Passed {
    /// Whether both are the same descriptors of this process.
    fn eq(&self, other: &Self) -> bool {
        self.numbers() == other.numbers()
    }
}

impl Eq for Passed {}
