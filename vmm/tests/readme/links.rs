//! Links of the pages: each leads to a file, and its anchor to a heading there, as GitHub names it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Folders of pages.
const FOLDERS: [&str; 7] = ["", "docs", "egm-device", "guest-tests", "vfio", "vmm", "vmm/src/export"];

/// Paths of the pages.
fn pages() -> Vec<PathBuf> {
    let root = Path::new("..");
    let entries = FOLDERS.iter().flat_map(|folder| fs::read_dir(root.join(folder)).unwrap());
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|end| end == "md")).collect()
}

#[test]
fn every_link_between_pages_leads_to_a_file_and_a_heading() {
    let (mut wrong, mut count) = (Vec::new(), 0);
    for page in pages() {
        let text = prose(&fs::read_to_string(&page).unwrap());
        for link in links(&text).filter(|link| !link.contains("://")) {
            count += 1;
            if let Err(reason) = follow(&page, link) {
                wrong.push(format!("{}: {link}: {reason}", page.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    assert!(count >= 200, "{count} links");
}

/// The reason why a link of `page` leads nowhere.
fn follow(page: &Path, link: &str) -> Result<(), &'static str> {
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = if path.is_empty() { page.to_owned() } else { page.with_file_name(path) };
    if !target.exists() {
        return Err("no such file");
    }
    if anchor.is_empty() || anchors(&prose(&fs::read_to_string(target).unwrap())).contains(anchor) {
        return Ok(());
    }
    Err("no such heading")
}

/// `text` without its blocks of code.
fn prose(text: &str) -> String {
    let mut in_block = false;
    let mut prose = String::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        } else if !in_block {
            prose.push_str(line);
            prose.push('\n');
        }
    }
    prose
}

/// Targets of the links in `text`.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|after| Some(after.split_once(')')?.0))
}

/// Anchors of the headings in `text`. A heading that is repeated gets -1, -2.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut uses: BTreeMap<String, usize> = BTreeMap::new();
    let mut anchors = BTreeSet::new();
    for heading in text.lines().filter_map(heading) {
        let slug = slug(heading);
        let before = uses.entry(slug.clone()).or_default();
        anchors.insert(if *before == 0 { slug } else { format!("{slug}-{before}") });
        *before += 1;
    }
    anchors
}

/// The text of a line that is a heading.
fn heading(line: &str) -> Option<&str> {
    let text = line.trim_start_matches('#');
    let level = line.len() - text.len();
    text.strip_prefix(' ').filter(|_| (1..=6).contains(&level))
}

/// A heading in lower case, with `-` for each space and without other characters than letters, digits, `-` and `_`. Of a
/// link its text counts.
fn slug(heading: &str) -> String {
    let mut text = String::new();
    let mut rest = heading;
    while let Some((before, after)) = rest.split_once("](") {
        text.push_str(before);
        rest = after.split_once(')').map_or("", |(_, rest)| rest);
    }
    text.push_str(rest);
    let dashes = text.trim().to_lowercase().replace(' ', "-");
    dashes.chars().filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect()
}

#[test]
fn an_anchor_is_the_heading_in_lower_case_with_dashes() {
    for (heading, anchor) in [
        ("Unsafe code", "unsafe-code"),
        ("One boot: `egm-vmm run FILE`", "one-boot-egm-vmm-run-file"),
        ("A request, and a reply", "a-request-and-a-reply"),
        ("Grace: real & emulated", "grace-real--emulated"),
        ("`cpus.host_cpus[]`", "cpushost_cpus"),
        ("cloud-hypervisor's [API](api.md#x), v1", "cloud-hypervisors-api-v1"),
        ("`\"type\": \"virtio-net\"`", "type-virtio-net"),
        ("Größe", "größe"),
    ] {
        assert_eq!(slug(heading), anchor, "{heading}");
    }
}

#[test]
fn a_repeated_heading_has_a_number_and_a_comment_in_code_is_no_heading() {
    let text = "# Title\n## Size\n```sh\n# a comment\n```\n### Size\n#Size\n####### Seven\n## Size\n";
    let named = ["size", "size-1", "size-2", "title"].map(str::to_owned);
    assert_eq!(anchors(&prose(text)), BTreeSet::from(named));
}

#[test]
fn a_link_to_a_missing_file_or_heading_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("a.md");
    fs::write(&page, "# One\n").unwrap();
    fs::write(folder.path().join("b.md"), "# Two\n").unwrap();
    for link in ["b.md", "b.md#two", "#one"] {
        assert_eq!(follow(&page, link), Ok(()), "{link}");
    }
    for link in ["b.md#one", "#two"] {
        assert_eq!(follow(&page, link), Err("no such heading"), "{link}");
    }
    assert_eq!(follow(&page, "c.md#one"), Err("no such file"));
}
