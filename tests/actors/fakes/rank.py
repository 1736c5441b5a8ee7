from fakes.fake import run

run()
