//! Rules of the virtual processors.

use egm_address::CpuSet;

use super::error::{Rule, in_range};
use super::faults::Faults;
use super::file::{AffinityFile, CpusFile};
use super::rules::CpuRule;
use super::spec::{Cpus, MAX_VCPUS};

/// The processors; `None` when they break a rule, which is noted.
pub(super) fn resolve(file: CpusFile, faults: &mut Faults) -> Option<Cpus> {
    let topology = file.topology.unwrap_or_default();
    let mut part = |value: Option<u32>, key: &str| {
        faults.value(format!("cpus.topology.{key}"), in_range(value.unwrap_or(1), 1, MAX_VCPUS))
    };
    let sockets = part(topology.sockets, "sockets");
    let threads = part(topology.threads, "threads");
    let cores = part(topology.cores, "cores");
    if let Some(count) = file.count {
        faults.value("cpus.count", in_range(count, 1, MAX_VCPUS));
    }
    if faults.are_in("cpus") {
        return None;
    }
    let (sockets, threads) = (sockets?, threads?);
    let cores = match (topology.cores, file.count) {
        (None, Some(count)) => count.checked_div(sockets.saturating_mul(threads)).unwrap_or(0).max(1),
        _ => cores?,
    };
    let product = u64::from(sockets).saturating_mul(u64::from(cores)).saturating_mul(u64::from(threads));
    let count = file.count.unwrap_or_else(|| u32::try_from(product).unwrap_or(u32::MAX));
    let count = faults.value("cpus.topology", in_range(count, 1, MAX_VCPUS))?;
    let topology = match u64::from(count) == product {
        true => Ok(()),
        false => Err(CpuRule::Topology { count, sockets, cores, threads, product }.into()),
    };
    let topology = faults.value("cpus.topology", topology);
    let affinity = faults.value("cpus.affinity", affinity(file.affinity, count));
    topology?;
    Some(Cpus { count, sockets, cores, threads, affinity: affinity? })
}

fn affinity(file: Option<AffinityFile>, count: u32) -> Result<Vec<CpuSet>, Rule> {
    let vcpus = usize::try_from(count).unwrap_or(usize::MAX);
    let lists = match file {
        None => return Ok(Vec::new()),
        Some(AffinityFile::All(list)) => vec![list; vcpus],
        Some(AffinityFile::Each(lists)) => lists,
    };
    if lists.len() != vcpus {
        let lists = u64::try_from(lists.len()).unwrap_or(u64::MAX);
        return Err(CpuRule::Affinity { count, lists }.into());
    }
    if lists.iter().any(CpuSet::is_empty) {
        return Err(Rule::EmptyList);
    }
    Ok(lists)
}
