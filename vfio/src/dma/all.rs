//! Many maps: the nodes of the host in parallel, and all or nothing.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::thread;

use egm_address::{Io, Span};

use super::order::Piece;
use super::{DmaError, Domain};

/// Mapped spans, and the first failure.
#[derive(Default)]
struct Progress {
    mapped: Vec<Span<Io>>,
    failed: Option<DmaError>,
}

/// Maps every piece, pieces of different nodes in parallel: one node's on this thread, each other's on one of its own. `enter`
/// is called first on each (to run near the node).
///
/// # Errors
/// The first failure; nothing is mapped then.
pub fn map_all(
    domain: &dyn Domain,
    pieces: Vec<Piece>,
    enter: &(dyn Fn(Option<u32>) + Sync),
) -> Result<(), DmaError> {
    let mut nodes: BTreeMap<Option<u32>, Vec<Piece>> = BTreeMap::new();
    pieces.into_iter().for_each(|piece| nodes.entry(piece.node).or_default().push(piece));
    let progress = Mutex::new(Progress::default());
    let map = |node, pieces: &[Piece]| {
        enter(node);
        map_each(domain, pieces, &progress);
    };
    let mut nodes = nodes.iter();
    let here = nodes.next();
    thread::scope(|scope| {
        for (node, pieces) in nodes {
            let spawned = thread::Builder::new().spawn_scoped(scope, || map(*node, pieces));
            if let (Err(source), Some(Piece { iova, .. })) = (spawned, pieces.first()) {
                let (iova, size, what) = (iova.start(), iova.size(), "start a thread for it");
                lock(&progress).failed.get_or_insert(DmaError::Refused { iova, size, what, source });
            }
        }
        here.inspect(|(node, pieces)| map(**node, pieces));
    });
    let Progress { mapped, failed } = progress.into_inner().unwrap_or_else(PoisonError::into_inner);
    let Some(error) = failed else { return Ok(()) };
    for span in mapped {
        let _ = domain.unmap(span); // report the first failure; the address space is given up
    }
    Err(error)
}

fn lock(progress: &Mutex<Progress>) -> std::sync::MutexGuard<'_, Progress> {
    progress.lock().unwrap_or_else(PoisonError::into_inner)
}

fn map_each(domain: &dyn Domain, pieces: &[Piece], progress: &Mutex<Progress>) {
    for Piece { iova, memory, offset, access, .. } in pieces {
        if egm_address::fault!("dma-span-unmapped") && *offset > 0 {
            continue;
        }
        if lock(progress).failed.is_some() {
            return;
        }
        let cut = if egm_address::fault!("dma-span-a-page-short") { 0x1000 } else { 0 };
        let iova = &Span::new(iova.start(), iova.size().saturating_sub(cut)).unwrap_or(*iova);
        let mapped = domain.map(*iova, memory, *offset, *access);
        let mut progress = lock(progress);
        match mapped {
            Ok(()) => progress.mapped.push(*iova),
            Err(error) => {
                progress.failed.get_or_insert(error);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::{Arc, Condvar};
    use std::time::Duration;

    use egm_address::Iova;

    use super::*;
    use crate::dma::{Access, Limits};
    use crate::fake::FakeDomain;
    use crate::mapping::Mapping;
    use crate::memory::HostMemory;

    fn pieces(nodes: &[Option<u32>]) -> Vec<Piece> {
        let memory: Arc<dyn HostMemory> = Arc::new(Mapping::pages(0x10_0000, 0).unwrap());
        let piece = |(start, node): (u64, &Option<u32>)| Piece {
            iova: Span::new(Iova::new(start * 0x1000), 0x1000).unwrap(),
            memory: Arc::clone(&memory),
            offset: start * 0x1000,
            access: Access::ReadWrite,
            node: *node,
        };
        (0..).zip(nodes).map(piece).collect()
    }

    #[test]
    fn every_node_is_entered_once_and_every_piece_is_mapped() {
        let domain = FakeDomain::default();
        let entered = Mutex::new(Vec::new());
        let nodes = [Some(0), Some(1), None, Some(0)];
        map_all(&domain, pieces(&nodes), &|node| entered.lock().unwrap().push(node)).unwrap();
        assert_eq!(domain.mapped().len(), 4);
        let entered = entered.into_inner().unwrap();
        assert_eq!((entered.len(), entered.into_iter().collect::<BTreeSet<_>>()), (3, nodes.into()));
    }

    /// An address space with maps that wait for each other: one alone fails.
    #[derive(Default)]
    struct Together {
        inside: Mutex<usize>,
        came: Condvar,
    }

    impl Domain for Together {
        fn limits(&self) -> Limits {
            Limits::default()
        }

        fn map(&self, iova: Span<Io>, _: &Arc<dyn HostMemory>, _: u64, _: Access) -> Result<(), DmaError> {
            let mut inside = self.inside.lock().unwrap();
            *inside += 1;
            self.came.notify_all();
            let waited = self.came.wait_timeout_while(inside, Duration::from_secs(60), |inside| *inside < 2);
            let alone = waited.unwrap().1.timed_out();
            let rule = "nobody else came";
            if alone { Err(DmaError::NoWay { iova: iova.start(), size: iova.size(), rule }) } else { Ok(()) }
        }

        fn unmap(&self, _: Span<Io>) -> Result<(), DmaError> {
            Ok(())
        }
    }

    #[test]
    fn pieces_of_two_nodes_are_mapped_at_the_same_time() {
        map_all(&Together::default(), pieces(&[Some(0), Some(1)]), &|_| {}).unwrap();
    }

    #[test]
    fn after_a_failure_nothing_is_mapped_and_the_cause_is_reported() {
        let limits = Limits { mappings: Some(2), ..Limits::default() };
        let domain = FakeDomain::new(limits, &[]);
        let failed = map_all(&domain, pieces(&[Some(0); 4]), &|_| {});
        assert!(matches!(failed, Err(DmaError::Refused { what: "map memory", .. })));
        assert!(domain.mapped().is_empty());
    }
}
